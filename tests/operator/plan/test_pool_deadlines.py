"""The deadlines of a pool's pods: to start, to be killed, to end."""

from __future__ import annotations

from typing import Any

import pytest
from support.pool_world import a_pool, runtime, template
from treeline_operator.api.pool import InferencePool
from treeline_operator.plan.engines import ENGINES, start_seconds
from treeline_operator.plan.runtime import pod_template
from treeline_operator.world import Images


@pytest.mark.parametrize("seconds", [1, 4, 60, 3600])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_grace_period_covers_all_steps_of_a_shutdown(seconds: int, engine: str) -> None:
    spec: dict[str, Any] = {"type": engine, "image": "x"}
    made = template(accelerator={"type": "nvidia"}, engine=spec, drain={"timeoutSeconds": seconds})["spec"]
    (container,) = made["containers"]
    notice = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    after = 0 if engine == "custom" else seconds
    assert notice >= (seconds if engine == "custom" else 1)
    assert made["terminationGracePeriodSeconds"] >= notice + after + 5


def test_a_pod_without_requests_is_gone_in_seconds() -> None:
    (container,) = template(drain={"timeoutSeconds": 600})["spec"]["containers"]
    assert container["lifecycle"]["preStop"]["sleep"]["seconds"] == 5
    assert container["args"][container["args"].index("--pre-stop") + 1] == "0"


def _sized(size: str | None, uri: str = "hf://org/name") -> InferencePool:
    return a_pool(model={"uri": uri} | ({"size": size} if size else {}))


def test_a_start_may_take_as_long_as_the_weights_need_and_never_less_than_without_a_size() -> None:
    for size, seconds in (("1Gi", 1800), ("8Gi", 1800), ("90Gi", 1800), ("140Gi", 2800), (None, 1800)):
        assert start_seconds(_sized(size)) == seconds
    assert start_seconds(_sized(None, "builtin://tiny")) == 120
    assert start_seconds(_sized("1Gi", "builtin://tiny")) == 120
    assert start_seconds(_sized("10Gi", "builtin://tiny")) == 200
    probe = pod_template(_sized("140Gi"), "abc", Images())["spec"]["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 2800


@pytest.mark.parametrize("seconds", [1, 60, 3600])
@pytest.mark.parametrize("engine", ENGINES)
def test_hanging_processes_are_killed_long_before_a_drain_ends(seconds: int, engine: str) -> None:
    made = runtime(engine={"type": engine, "image": "x"}, drain={"timeoutSeconds": seconds})
    assert made["livenessProbe"]["terminationGracePeriodSeconds"] == 15
    assert made["startupProbe"]["terminationGracePeriodSeconds"] == 15
    assert "terminationGracePeriodSeconds" not in made["readinessProbe"], "the API server refuses it there"
