"""A runtime is killed, runs out of memory, hangs, answers 500: only its own streams end, and the others go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from e2e.kit.engines import BROKEN, SCRIPT, SCRIPTED
from e2e.kit.faults import HANGS, fill_memory, kill_runtime, stop_runtime
from e2e.kit.system import Installed, pool
from e2e.kit.traffic import Mix, traffic

pytestmark = pytest.mark.chaos

PICKER_NOTICES_S: Final = 5.0
"""Three seconds of silence, and an allowance for a busy machine."""


@pytest.fixture(scope="module")
def treeline(of_this_file: Installed) -> Installed:
    return of_this_file


def restarts(pod: dict[str, Any]) -> int:
    return int(pod["status"]["containerStatuses"][0]["restartCount"])


def ended(treeline: Installed, before: dict[str, Any]) -> dict[str, Any]:
    """Return how a pod's container ended since ``before``; empty if it has not."""
    for pod in treeline.pods("runtime"):
        if pod["metadata"]["uid"] == before["metadata"]["uid"] and restarts(pod) > restarts(before):
            found: dict[str, Any] = pod["status"]["containerStatuses"][0]["lastState"]["terminated"]
            return found
    return {}


def only_its_own_streams_end(
    treeline: Installed, kept: Path, fault: Callable[[dict[str, Any]], object], notice_s: float = 0.5
) -> dict[str, Any]:
    """Check that a fault of one of two runtimes under traffic ends only its own streams, and return how its container
    ended. Streams that broke were on it at the time of the fault; those that begin ``notice_s`` later are served."""
    treeline.await_ready("tiny")
    # A container that ends again and again is started later and later.
    victim, other = sorted(treeline.ready_pods("runtime"), key=restarts)
    with traffic(treeline.url(), kept=kept) as driver:
        driver.await_served(10)
        fault(victim)
        noticed = time.monotonic() + notice_s
        how = treeline.until(lambda: ended(treeline, victim), "the container to end")
        treeline.await_ready("tiny")
        back = time.monotonic()
        treeline.until(lambda: driver.report().since(back).hosts() >= {ip(victim), ip(other)}, "both to serve")
        report = driver.stop()
    for stream in report.dropped:
        assert stream.begun < noticed, f"begun at {stream.begun:.1f}, {noticed:.1f} is late\n{report}"
        assert stream.host in ("", ip(victim)), str(report)
    # Those without an endpoint had no answer yet: no more than the workers can have had there.
    assert len(report.dropped) <= driver.mix.workers * 2, str(report)
    return dict(how)


def ip(pod: dict[str, Any]) -> str:
    return str(pod["status"]["podIP"])


def test_a_killed_runtime_loses_only_its_own_streams(treeline: Installed, kept: Path) -> None:
    treeline.apply(pool("tiny", template=HANGS))
    only_its_own_streams_end(treeline, kept, lambda pod: kill_runtime(treeline.kube, pod))


def test_a_runtime_out_of_memory_loses_only_its_own_streams(treeline: Installed, kept: Path) -> None:
    treeline.apply(pool("tiny", template=HANGS))
    how = only_its_own_streams_end(treeline, kept, lambda pod: fill_memory(treeline.kube, pod))
    assert how["reason"] == "OOMKilled", how


def test_a_hanging_runtime_is_restarted_by_its_liveness_probe(treeline: Installed, kept: Path) -> None:
    treeline.apply(pool("tiny", template=HANGS))
    only_its_own_streams_end(treeline, kept, lambda pod: stop_runtime(treeline.kube, pod), PICKER_NOTICES_S)


def test_a_runtime_that_answers_500_is_excluded_until_it_recovers(treeline: Installed, kept: Path) -> None:
    """Its probes say that it is healthy, and it answers faster than all others."""
    treeline.apply(SCRIPT, pool("scripted", **SCRIPTED))
    treeline.await_ready("scripted")
    victim, other = treeline.ready_pods("runtime", "scripted")
    with traffic(treeline.url(), Mix(models=("scripted",), pause_s=0.01), kept) as driver:
        treeline.until(lambda: driver.report().hosts() == {ip(victim), ip(other)}, "both to serve")
        treeline.inside(victim, "touch", BROKEN)
        treeline.until(lambda: driver.report().of("refused"), "an error")
        broken = time.monotonic()
        driver.await_served(200)
        treeline.inside(victim, "rm", BROKEN)
        mended = time.monotonic()
        treeline.until(lambda: ip(victim) in driver.report().since(mended).hosts(), "it to be used again")
        report = driver.stop()
    errors = report.of("refused")
    assert {(stream.status, stream.endpoint) for stream in errors} == {(500, "")}, str(report)
    # Three in a row open the breaker, others may be under way then; afterwards one request a try, in 1, 2, 4, … s.
    tries = 1 + int(mended - broken).bit_length()
    assert len(errors) <= 3 + driver.mix.workers + tries, str(report)
    assert not report.of("truncated", "failed"), str(report)
