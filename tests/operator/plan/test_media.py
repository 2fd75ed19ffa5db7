"""Limits of images and recordings: flags that the engine parses, shared memory, and the way out to allowed domains."""

from __future__ import annotations

from typing import Any

import pytest
from support.operator_status import pool
from support.pool_world import template
from treeline_operator.plan.network import pods_policy
from treeline_operator.world import Platform
from treeline_runtime.args import parse_args

LIMITS = {
    "items": 2,
    "imagePixels": 1000000,
    "audioSeconds": 60,
    "videoSeconds": 30,
    "allowedDomains": ["images.example.org", "*.example.net"],
}


def container(**engine: Any) -> dict[str, Any]:
    (found,) = template(engine=engine)["spec"]["containers"]
    return dict(found)


def test_the_engine_parses_the_flags() -> None:
    args = parse_args(container(media=LIMITS)["args"])
    assert (args.max_images, args.max_image_pixels) == (2, 1000000)
    assert (args.max_audio_seconds, args.max_video_seconds) == (60, 30)
    assert args.allowed_media_domains == ("images.example.org", "*.example.net")


def test_without_them_pods_are_as_they_were_and_the_runtime_has_its_defaults() -> None:
    plain, empty = container(), container(media={})
    assert plain["args"] == empty["args"]
    assert not any("media" in arg or "image" in arg for arg in plain["args"])


def test_outputs_of_processors_have_shared_memory() -> None:
    assert "/dev/shm" not in {mount["mountPath"] for mount in container()["volumeMounts"]}
    assert "/dev/shm" in {mount["mountPath"] for mount in container(media={})["volumeMounts"]}


@pytest.mark.parametrize("media", [None, {"items": 3}, LIMITS])
def test_pods_reach_the_internet_only_if_domains_are_allowed(media: dict[str, Any] | None) -> None:
    of = pool(**({} if media is None else {"engine": {"media": media}}))
    policy = pods_policy(of, (), Platform(), {"name": "p"}, meet=0)
    open_to_all = [rule for rule in policy["spec"]["egress"] if "to" not in rule]
    allowed = bool(media) and "allowedDomains" in (media or {})
    assert open_to_all == ([{"ports": [{"protocol": "TCP", "port": 443}]}] if allowed else [])
