"""What the status of a pool tells of groups that are not made, that end, or that are late."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from support.pool_world import EVERY_API, SimCluster, a_pool, grouped, settled
from treeline_operator.api.conditions import ConditionType, Reason
from treeline_operator.api.pool import InferencePool
from treeline_operator.plan.facts import created
from treeline_operator.plan.revision import UNSEEN_S
from treeline_operator.status.pool import pool_status
from treeline_operator.world import Platform

PLATFORM = Platform(apis=EVERY_API)


def group_set(cluster: SimCluster) -> dict[str, Any]:
    (found,) = cluster.groups().values()
    return found


def told(cluster: SimCluster, pool: InferencePool, kind: ConditionType = ConditionType.WORKLOADS_READY) -> Any:
    (found,) = (one for one in pool_status(cluster.world(pool))["conditions"] if one["type"] == kind)
    return found


def test_groups_that_no_controller_makes_are_told_after_a_minute() -> None:
    cluster = SimCluster(PLATFORM)
    cluster.do(cluster.plan(grouped()))
    cluster.now = created(group_set(cluster)) + timedelta(seconds=UNSEEN_S - 1)
    assert told(cluster, grouped())["reason"] == Reason.PODS_STARTING
    assert cluster.plan(grouped()).recheck_s == UNSEEN_S
    cluster.now += timedelta(seconds=1)
    condition, name = told(cluster, grouped()), group_set(cluster)["metadata"]["name"]
    assert condition["reason"] == Reason.LEADER_WORKER_SET_MISSING
    assert f"no controller has seen LeaderWorkerSet {name}" in condition["message"]
    cluster.controllers()
    assert told(cluster, grouped())["reason"] == Reason.PODS_STARTING
    assert cluster.plan(grouped()).recheck_s is None


@pytest.mark.parametrize("state", ["state", "lastState"])
@pytest.mark.parametrize(
    ("end", "reason", "words"),
    [
        ({"exitCode": 3, "message": "error: no route to the leader"}, Reason.CRASH_LOOPING, "no route to the leader"),
        ({"exitCode": 137, "reason": "OOMKilled"}, Reason.OUT_OF_MEMORY, "more memory than its limit"),
    ],
)
def test_the_end_of_a_worker_is_told_although_its_group_leaves(
    end: dict[str, Any], reason: Reason, words: str, state: str
) -> None:
    cluster = settled(grouped(), platform=PLATFORM)
    name = group_set(cluster)["metadata"]["name"]
    leader, worker = cluster.pods[f"{name}-0"], cluster.pods[f"{name}-0-1"]
    worker["status"]["containerStatuses"] = [
        {"name": "runtime", "restartCount": 1, "ready": True, "state": {"running": {}}} | {state: {"terminated": end}}
    ]
    leader["metadata"]["deletionTimestamp"] = cluster.now.isoformat()
    for leaving in ({}, {"deletionTimestamp": cluster.now.isoformat()}):
        worker["metadata"].update(leaving)
        condition = told(cluster, grouped())
        assert condition["reason"] == reason
        assert words in condition["message"]
    worker["status"]["containerStatuses"][0][state] = {"terminated": {"exitCode": 143}}
    assert told(cluster, grouped())["reason"] == Reason.PODS_STARTING, "it was asked to end"


def test_groups_that_are_not_ready_in_time_stall_their_rollout() -> None:
    cluster = settled(grouped(), platform=PLATFORM)
    cluster.crash(f"{group_set(cluster)['metadata']['name']}-0")
    allowed = timedelta(seconds=settled(a_pool()).deployments().popitem()[1]["spec"]["progressDeadlineSeconds"])
    groups, begun = group_set(cluster), cluster.now + timedelta(days=1)
    groups["status"]["conditions"] = [
        {"type": "Progressing", "status": "True", "lastTransitionTime": begun.isoformat()}
    ]

    def reason(since: timedelta) -> str:
        cluster.now = begun + since
        return str(told(cluster, grouped(), ConditionType.PROGRESSING)["reason"])

    assert reason(allowed - timedelta(seconds=1)) != Reason.ROLLOUT_STALLED
    assert reason(allowed) == Reason.ROLLOUT_STALLED
    groups["status"]["conditions"] = []
    assert reason(allowed) == Reason.ROLLOUT_STALLED, "without a report, since it was made"
    groups["status"]["conditions"] = [{"type": "Progressing", "status": "False"}]
    assert reason(allowed) != Reason.ROLLOUT_STALLED, "all were ready just before"
