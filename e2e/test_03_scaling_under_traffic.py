"""2 → 4 → 1 → none under traffic: no stream is dropped, new pods are used at once, leaving pods are drained first."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import pytest

from e2e.kit.figures import Figures
from e2e.kit.system import Installed, pool
from e2e.kit.traffic import Mix, Traffic, traffic

READY: Final = "{.status.podIP} {.status.conditions[?(@.type=='Ready')].status}"


@pytest.fixture(scope="module")
def treeline(of_this_file: Installed) -> Installed:
    return of_this_file


def test_scaling_up_and_down_drops_no_stream(treeline: Installed, figures: Figures, kept: Path) -> None:
    treeline.apply(pool("tiny"))
    treeline.await_ready("tiny")
    with traffic(treeline.url(), kept=kept) as driver:
        driver.await_served(10)
        # Frequent new prompts, so that a new pod soon gets a request.
        with traffic(treeline.url(), Mix(workers=2, long_share=0.0, new_share=1.0, seed=8)) as often:
            routed = grow(treeline, 4, driver, often)
            assert not (asked := often.stop()).dropped, str(asked)
        figures.add("e2e.ready_to_routed_s.p95", *routed)
        treeline.change("tiny", replicas=1)
        treeline.until(lambda: len(treeline.pods("runtime")) == 1, "three pods to be gone")
        treeline.await_ready("tiny")
        driver.await_served(10)
        report = driver.stop()
    assert not report.dropped, str(report)


def grow(treeline: Installed, replicas: int, *drivers: Traffic) -> list[float]:
    """Scale up. Return for each new pod the seconds from Ready to the first request that any driver sends it."""
    known = {pod["status"]["podIP"] for pod in treeline.ready_pods("runtime")}
    runtimes = "treeline.dev/component=runtime"
    with treeline.kube.watched("pods", treeline.namespace, READY, runtimes) as seen:
        treeline.change("tiny", replicas=replicas)

        def ready() -> dict[str, float]:
            """Return for each new pod's address the time since which it is Ready."""
            found: dict[str, float] = {}
            for at, text in list(seen):
                address, _, status = text.partition(" ")
                if status == "True" and address not in known:
                    found.setdefault(address, at)
            return found

        treeline.until(lambda: len(ready()) == replicas - len(known), f"{replicas} pods to be ready")
        treeline.until(lambda: ready().keys() <= first(drivers).keys(), "each new pod to be used")
    begun = first(drivers)
    return [max(0.0, begun[address] - at) for address, at in ready().items()]


def first(drivers: Iterable[Traffic]) -> dict[str, float]:
    """Return for each address the time at which the first of its ended streams began."""
    streams = [stream for driver in drivers for stream in driver.report().streams]
    return {stream.host: stream.begun for stream in sorted(streams, key=lambda s: s.begun, reverse=True)}


def test_a_pod_without_streams_does_not_wait_for_its_drain_to_end(treeline: Installed, figures: Figures) -> None:
    treeline.apply(pool("tiny"))
    treeline.await_ready("tiny")
    begun = time.monotonic()
    treeline.change("tiny", replicas=1)
    treeline.until(lambda: len(treeline.pods("runtime")) == 1, "a pod to be gone")
    figures.add("e2e.drain_s", time.monotonic() - begun)


def test_a_pool_that_is_deleted_finishes_its_streams(treeline: Installed, kept: Path) -> None:
    treeline.apply(pool("tiny"))
    treeline.await_ready("tiny")
    with traffic(treeline.url(), Mix(long_share=1.0, long_tokens=600), kept) as driver:
        treeline.until(lambda: driver.under_way(1.0), "a stream that has just begun")
        driver.begin_no_more()
        deleted = time.monotonic()
        treeline.conclude()
        report = driver.stop()
    assert not report.dropped, str(report)
    assert any((stream.ended or deleted) > deleted + 1.0 for stream in report.streams), str(report)
