"""The picker's pod is deleted under traffic: open, nothing fails; closed, requests are refused as they should be."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import pytest

from e2e.kit.system import Installed, ask, pool
from e2e.kit.traffic import traffic

LEARNT_S: Final = 5.0
"""A new picker has the tree back in this time."""


BACK_S: Final = 2.0
"""A gateway that refuses without a picker serves so soon after there is one again."""


def replace_picker(treeline: Installed, *, now: bool = False) -> None:
    """Delete the picker's pod; until there is another that is ready."""
    (old,) = treeline.ready_pods("epp")
    treeline.delete_pod(old, now=now)
    treeline.until(
        lambda: [p for p in treeline.ready_pods("epp") if p["metadata"]["uid"] != old["metadata"]["uid"]],
        "another picker",
    )


def question(number: int) -> list[dict[str, str]]:
    rules = f"These are the rules of room {number}. " + "Answer in one short sentence. " * 60
    return [{"role": "system", "content": rules}, {"role": "user", "content": "What is the capital of Peru?"}]


def cached(url: str, number: int) -> int:
    """How many tokens of the prompt were in the cache of the pod that was chosen for it."""
    return int(ask(url, messages=question(number), max_tokens=1).headers["x-treeline-cached-tokens"])


def test_open_nothing_fails_and_the_tree_is_learnt_anew(treeline: Installed, kept: Path) -> None:
    treeline.apply(pool("tiny"))
    treeline.await_ready("tiny")
    url = treeline.url()
    rooms = range(8)
    for number in rooms:
        cached(url, number)
    with traffic(url, kept=kept) as driver:
        driver.await_served(5)
        replace_picker(treeline)
        back = time.monotonic()
        # Each prompt is in one of the two caches. Without the tree half of them would miss.
        hits = [cached(url, number) > 200 for number in rooms]
        took = time.monotonic() - back
        driver.await_served(5)
        report = driver.stop()
    assert not report.dropped, str(report)
    assert sum(hits) >= 7, hits
    assert took < LEARNT_S


@pytest.mark.chaos
def test_closed_requests_are_refused_with_503_and_no_stream_is_cut(treeline: Installed, kept: Path) -> None:
    treeline.apply(pool("tiny", endpointPicker={"failureMode": "FailClose"}))
    treeline.await_ready("tiny")
    with traffic(treeline.url(), kept=kept) as driver:
        replace_picker(treeline, now=True)
        back = time.monotonic() + BACK_S
        treeline.until(lambda: driver.report().since(back).of("served"), "requests to be served again")
        driver.await_served(5)
        report = driver.stop()
    assert report.of("refused"), str(report)
    assert not report.since(back).dropped, str(report)
    assert not report.of("truncated", "failed"), str(report)
    assert {stream.status for stream in report.of("refused")} == {503}, str(report)
    assert all("picker_unavailable" in stream.why for stream in report.of("refused")), str(report)
