"""What the status of a pool with `spec.prefill` tells of its two sides."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from support.pool_world import SimCluster, a_pool, is_ready, settled
from treeline_operator.api.conditions import ConditionType, Reason
from treeline_operator.api.pool import InferencePool
from treeline_operator.status.pool import pool_status
from treeline_operator.world import Scaling
from treeline_wire.labels import ROLE


def pair(**spec: Any) -> InferencePool:
    made = {"accelerator": {"type": "nvidia"}, "engine": {"type": "vllm"}, "replicas": 2, "prefill": {}}
    return a_pool(**{**made, **spec})


def told(cluster: SimCluster, pool: InferencePool, kind: ConditionType = ConditionType.WORKLOADS_READY) -> Any:
    (found,) = (one for one in pool_status(cluster.world(pool))["conditions"] if one["type"] == kind)
    return found


def prompts(cluster: SimCluster) -> list[dict[str, Any]]:
    return [pod for pod in cluster.pods.values() if pod["metadata"]["labels"][ROLE] == "prefill"]


def test_the_figures_of_both_sides_are_apart() -> None:
    pool = pair(prefill={"replicas": 3})
    status = pool_status(settled(pool).world(pool))
    assert (status["replicas"], status["readyReplicas"], status["replicaSummary"]) == (2, 2, "2/2")
    assert status["prefill"] == {"replicas": 3, "ready": 3}
    assert "treeline.dev/role!=prefill" in status["selector"]
    assert "prefill" not in pool_status(settled(a_pool()).world(a_pool()))


@pytest.mark.parametrize(("bounds", "pods"), [({"minReplicas": 2, "maxReplicas": 4}, 4), ({}, 3)])
def test_the_plan_follows_the_advice_within_bounds_where_there_are_any(bounds: dict[str, int], pods: int) -> None:
    auto = {"type": "Picker", "maxReplicas": 9} if bounds else {"type": "None"}
    pool = pair(prefill={"replicas": 3, **bounds}, autoscaling=auto)
    cluster = settled(pool)
    assert len(prompts(cluster)) == 3
    status = pool_status(dataclasses.replace(cluster.world(pool), scaling=Scaling(True, prompts=6)))
    assert status["prefill"]["advisedReplicas"] == 6
    advised = pool.model_copy(update={"status": status})
    cluster.converge(advised)
    assert len(prompts(cluster)) == pods
    assert pool_status(cluster.world(advised))["prefill"] == {"replicas": pods, "ready": pods, "advisedReplicas": 6}
    cluster.converge(pool.model_copy(update={"status": {"prefill": {"advisedReplicas": 1}}}))
    assert len(prompts(cluster)) == bounds.get("minReplicas", 3)


def test_the_side_that_is_missing_is_named() -> None:
    pool = pair()
    cluster = settled(pool)
    assert told(cluster, pool)["message"] == "decode: 2 of 2 pods are ready; prefill: 1 of 1 pods are ready."
    (pod,) = prompts(cluster)
    cluster.crash(pod["metadata"]["name"])
    workloads = told(cluster, pool)
    assert (workloads["status"], workloads["reason"]) == ("False", Reason.CRASH_LOOPING)
    assert workloads["message"].startswith("decode: 2 of 2 pods are ready; prefill: 0 of 1 pods are ready; ")
    assert pool_status(cluster.world(pool))["prefill"] == {"replicas": 1, "ready": 0}


def test_a_prefill_side_that_starts_is_progress() -> None:
    cluster = settled(pair())
    more = pair(prefill={"replicas": 2})
    cluster.do(cluster.plan(more))
    cluster.controllers()
    progressing = told(cluster, more, ConditionType.PROGRESSING)
    assert (progressing["status"], progressing["reason"]) == ("True", Reason.PODS_STARTING)
    assert "2 of 2 pods are ready; prefill: " in progressing["message"]
    cluster.make_ready()
    assert all(map(is_ready, cluster.pods.values()))
    assert told(cluster, more, ConditionType.PROGRESSING)["reason"] == Reason.ROLLOUT_COMPLETE


def test_a_pool_scaled_to_zero_wants_no_prefill_pods() -> None:
    none = pair(replicas=0)
    cluster = settled(none)
    assert cluster.pods == {}
    workloads = told(cluster, none)
    assert (workloads["status"], workloads["reason"]) == ("True", Reason.SCALED_TO_ZERO)
    assert workloads["message"].startswith("no pods are wanted.")
