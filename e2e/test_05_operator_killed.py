"""kill -9 of the operator while a pool scales and rolls; kill -9 of the leader of two replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from e2e.kit.faults import kill_first_process
from e2e.kit.system import OPERATORS, SYSTEM, Installed, pool
from e2e.kit.traffic import traffic
from e2e.test_04_rollout_under_traffic import annotated, revisions


@pytest.fixture(scope="module")
def treeline(of_this_file: Installed) -> Installed:
    return of_this_file


def operators(treeline: Installed) -> list[dict[str, Any]]:
    """Return the operator's pods whose container runs."""
    pods = treeline.kube.pods(SYSTEM, OPERATORS)
    return [pod for pod in pods if pod["status"].get("phase") == "Running"]


def kill_operators(treeline: Installed, name: str = "") -> None:
    """kill -9 all replicas, or one."""
    for pod in operators(treeline):
        if name in ("", pod["metadata"]["name"]):
            kill_first_process(treeline.kube, pod)


def leader(treeline: Installed) -> str:
    """Return the pod that holds the lease; its identity begins with the pod's name."""
    lease = treeline.kube.get("lease", "treeline-operator", SYSTEM)
    holder = str(((lease or {}).get("spec") or {}).get("holderIdentity") or "")
    return holder.partition("_")[0]


def test_the_operator_is_killed_while_a_pool_scales_and_rolls(treeline: Installed, kept: Path) -> None:
    treeline.apply(pool("tiny"))
    treeline.await_ready("tiny")
    (old,) = revisions(treeline)
    with traffic(treeline.url(), kept=kept) as driver:
        treeline.change("tiny", replicas=3)
        kill_operators(treeline)
        treeline.until(lambda: len(treeline.ready_pods("runtime")) == 3, "the third pod")
        treeline.change("tiny", replicas=2, template=annotated("two"))
        treeline.until(lambda: len(revisions(treeline)) == 2, "a pod of the new revision")
        kill_operators(treeline)
        treeline.until(lambda: old not in revisions(treeline), "the old revision to be gone")
        treeline.await_ready("tiny")
        driver.await_served(5)
        report = driver.stop()
    assert not report.dropped, str(report)


def test_the_other_replica_takes_over_from_a_killed_leader(treeline: Installed, kept: Path) -> None:
    treeline.apply(pool("tiny"))
    treeline.await_ready("tiny")
    first = leader(treeline)
    assert first
    with traffic(treeline.url(), kept=kept) as driver:
        kill_operators(treeline, first)
        treeline.change("tiny", replicas=3)
        treeline.until(lambda: leader(treeline) not in ("", first), "another leader")
        treeline.until(lambda: len(treeline.ready_pods("runtime")) == 3, "its work")
        report = driver.stop()
    assert not report.dropped, str(report)
