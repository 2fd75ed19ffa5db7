"""Random faults under traffic; then everything converges and the books balance. CHAOS_MINUTES (3), CHAOS_SEED (1)."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.kit.system import Installed, pool
from e2e.kit.traffic import traffic
from e2e.test_04_rollout_under_traffic import annotated
from e2e.test_05_operator_killed import kill_operators
from e2e.test_07_runtime_dies import kill_runtime

MINUTES = float(os.environ.get("CHAOS_MINUTES", "3"))
SEED = int(os.environ.get("CHAOS_SEED", "1"))


@pytest.mark.timeout(MINUTES * 60 + 600)
def test_the_books_balance(treeline: Installed, kept: Path) -> None:
    treeline.apply(pool("tiny", gateway={"standalone": {"replicas": 2}}))
    treeline.await_ready("tiny")
    chance = random.Random(SEED)
    killed: set[str] = set()
    story: list[str] = []

    def a_pod(component: str) -> dict | None:
        pods = treeline.ready_pods(component)
        return chance.choice(pods) if len(pods) > 1 or component == "epp" else None

    def kill_a_runtime() -> None:
        if pod := a_pod("runtime"):
            killed.add(pod["status"]["podIP"])
            kill_runtime(treeline, pod)

    def delete(component: str) -> Callable[[], None]:
        def act() -> None:
            if pod := a_pod(component):
                treeline.delete_pod(pod)

        return act

    faults: dict[str, Callable[[], None]] = {
        "a runtime is killed": kill_a_runtime,
        "a runtime is deleted": delete("runtime"),
        "an Envoy is deleted": delete("edge"),
        "the picker is deleted": delete("epp"),
        "the operator is killed": lambda: kill_operators(treeline),
        "another number of replicas": lambda: treeline.change("tiny", replicas=chance.randint(2, 3)),
        "another template": lambda: treeline.change("tiny", template=annotated(str(chance.random()))),
    }
    with traffic(treeline.url(), kept=kept) as driver:
        begun = time.monotonic()
        while time.monotonic() - begun < MINUTES * 60:
            name = chance.choice(sorted(faults))
            story.append(f"+{time.monotonic() - begun:.0f} s {name}")
            faults[name]()
            driver.await_served(chance.randint(3, 20), 120.0)
        treeline.await_ready("tiny", seconds=240.0)
        driver.await_served(10)
        report = driver.stop()
    told = "\n".join([*story, str(report)])
    for stream in report.of("truncated", "failed"):
        assert stream.endpoint.rpartition(":")[0] in killed or not stream.endpoint, told
    assert {s.status for s in report.of("refused")} <= {429, 503}, told
    unanswered = [s for s in report.of("failed") if not s.endpoint]
    assert len(unanswered) <= len(killed), told
    kept.with_suffix(".txt").write_text(told + "\n")
    treeline.conclude()
