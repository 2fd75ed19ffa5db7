"""A runtime is killed, runs out of memory, hangs: only its own streams end, and the rest goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.kit.system import Installed, pool
from e2e.kit.traffic import Report, traffic


def signal_runtime(treeline: Installed, pod: dict, signal_name: str) -> None:
    """Send a signal to all processes of a runtime's container but the first, which a container cannot kill itself."""
    script = (
        "import os, signal\n"
        "for name in os.listdir('/proc'):\n"
        f"    if name.isdigit() and int(name) not in (1, os.getpid()): os.kill(int(name), signal.{signal_name})"
    )
    treeline.kube.kubectl(
        "-n", treeline.namespace, "exec", pod["metadata"]["name"], "-c", "runtime", "--", "python3", "-c", script,
        check=False,
    )  # fmt: skip


def restarts(treeline: Installed, name: str) -> int:
    for pod in treeline.pods("runtime"):
        if pod["metadata"]["name"] == name:
            return int(pod["status"]["containerStatuses"][0]["restartCount"])
    return 0


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_only_its_own_streams_end(treeline: Installed, kept: Path, name: str) -> None:
    """SIGKILL ends its processes at once; SIGSTOP makes it hang until its liveness probe fails."""
    treeline.apply(pool("tiny"))
    treeline.await_ready("tiny")
    victim, other = treeline.ready_pods("runtime")
    with traffic(treeline.url(), kept=kept) as driver:
        driver.await_served(10)
        signal_runtime(treeline, victim, name)
        treeline.until(
            lambda: restarts(treeline, victim["metadata"]["name"]) > 0, "the container to be restarted", 150.0
        )
        treeline.await_ready("tiny", seconds=120.0)
        driver.await_served(10)
        report = driver.stop()
    assert_only_of(report, victim, other)
    treeline.conclude()


def assert_only_of(report: Report, victim: dict, other: dict) -> None:
    """What was cut off was on the victim; what had not begun there was served elsewhere or refused properly."""
    for stream in report.of("truncated"):
        assert stream.endpoint.startswith(victim["status"]["podIP"]), str(report)
    cut = [s for s in report.dropped if not s.endpoint.startswith(victim["status"]["podIP"])]
    assert len(cut) <= 2, str(report)
    assert report.endpoints()[f"{other['status']['podIP']}:8000"] > 5, str(report)


def test_memory_that_runs_out(treeline: Installed, kept: Path) -> None:
    treeline.apply(pool("tiny"))
    treeline.await_ready("tiny")
    victim, other = treeline.ready_pods("runtime")
    eat = "x = bytearray(3 << 30)"
    with traffic(treeline.url(), kept=kept) as driver:
        driver.await_served(5)
        name = victim["metadata"]["name"]
        said = treeline.kube.kubectl(
            "-n", treeline.namespace, "exec", name, "-c", "runtime", "--", "python3", "-c", eat, check=False
        )  # the kernel ends one process of the container: this one, or one of the runtime's
        assert said == ""
        treeline.await_ready("tiny", seconds=120.0)
        driver.await_served(10)
        report = driver.stop()
    assert_only_of(report, victim, other)
    treeline.conclude()
