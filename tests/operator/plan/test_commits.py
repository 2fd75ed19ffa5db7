"""The commit of a model whose URI names none: the first pod's commit is used by all, and the status shows it."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from support.pool_world import HF, SimCluster, a_pool, kinds, template
from treeline_operator.actions import Apply, Plan
from treeline_operator.api.conditions import ConditionType, Reason
from treeline_operator.api.pool import InferencePool
from treeline_operator.plan.download import moving
from treeline_operator.plan.pool import plan_pool
from treeline_operator.status.pool import pool_status
from treeline_runtime.fetch.__main__ import COMMITS

URI = HF["model"]["uri"]
ONE, OTHER = "a" * 40, "b" * 40


def downloaded(cluster: SimCluster, *commits: str, uri: str = URI) -> list[str]:
    """Return the pods, the oldest first; their downloads have ended and reported these commits."""
    pods = sorted(cluster.pods, key=lambda name: int(name.rsplit("-", 1)[1]))
    for age, (name, commit) in enumerate(zip(pods, commits, strict=True)):
        pod = cluster.pods[name]
        pod["metadata"]["creationTimestamp"] = (cluster.now + timedelta(seconds=age)).isoformat()
        (init,) = pod["status"]["initContainerStatuses"]
        init["state"]["terminated"]["message"] = f"{uri} {commit}"
    return pods


def started(pool: InferencePool, *commits: str) -> SimCluster:
    cluster = SimCluster()
    cluster.converge(pool)
    downloaded(cluster, *commits)
    cluster.converge(pool)
    return cluster


def warning(cluster: SimCluster, pool: InferencePool) -> dict[str, Any] | None:
    found = pool_status(cluster.world(pool))["conditions"]
    return next((dict(one) for one in found if one["type"] == ConditionType.WARNINGS), None)


def test_the_first_pods_commit_is_recorded_and_passed_to_the_next_ones() -> None:
    pool = a_pool(replicas=1, **HF)
    cluster = SimCluster()
    cluster.converge(pool)
    assert "ConfigMap" not in {ref.kind for ref in cluster.objects}, "no commit is known yet"
    assert "modelCommit" not in pool_status(cluster.world(pool))
    downloaded(cluster, ONE)
    assert kinds(cluster.plan(pool)) == ["Apply ConfigMap tiny-commits"]
    cluster.converge(pool)
    record = cluster.get("ConfigMap", "tiny-commits")
    assert record["data"] == {"commits": f"{URI} {ONE}"}
    assert record["metadata"]["ownerReferences"][0]["name"] == "tiny"
    assert pool_status(cluster.world(pool))["modelCommit"] == ONE
    (init,) = cluster.deployments().popitem()[1]["spec"]["template"]["spec"]["initContainers"]
    reference = {"name": "tiny-commits", "key": "commits", "optional": True}
    assert {"name": COMMITS, "valueFrom": {"configMapKeyRef": reference}} in init["env"]


def test_recorded_commits_stay_when_pods_leave_and_branches_move() -> None:
    cluster = started(a_pool(**HF), ONE)
    more = a_pool(replicas=2, **HF)
    cluster.pods.clear()
    cluster.converge(more)
    first, _ = downloaded(cluster, OTHER, ONE)
    cluster.converge(more)
    assert cluster.get("ConfigMap", "tiny-commits")["data"] == {"commits": f"{URI} {ONE}"}
    told = warning(cluster, more)
    assert told is not None
    assert told["reason"] == Reason.VERSIONS_DIFFER
    assert f"pod {first} has commit {OTHER} of {URI}, the pool's is {ONE}" in told["message"]


def test_pods_with_one_commit_cause_no_warning_and_a_second_model_has_its_own_line() -> None:
    cluster = started(a_pool(replicas=2, **HF), ONE, ONE)
    assert warning(cluster, a_pool(replicas=2, **HF)) is None
    pool = a_pool(model={"uri": "hf://org/next@main"}, replicas=2)
    cluster.converge(pool)
    downloaded(cluster, *[OTHER] * len(cluster.pods), uri="hf://org/next@main")
    cluster.converge(pool)
    lines = cluster.get("ConfigMap", "tiny-commits")["data"]["commits"].splitlines()
    assert lines == [f"{URI} {ONE}", f"hf://org/next@main {OTHER}"], "going back finds the commit of before"


def test_a_running_download_shares_its_commit_with_new_ones() -> None:
    pool = a_pool(**HF)
    cluster = SimCluster()
    cluster.converge(pool)
    told = {URI: ONE, "hf://else/where": ONE, f"{URI}\nhf://x/y": "z"}
    (action,) = plan_pool(replace(cluster.world(pool), commits=told)).actions
    assert isinstance(action, Apply)
    assert action.object["data"] == {"commits": f"{URI} {ONE}"}
    cluster.do(Plan((action,)))
    later = replace(cluster.world(pool), commits={URI: OTHER})
    assert plan_pool(later).actions == (), "what is written down stays"


@pytest.mark.parametrize(
    "spec",
    [
        {"model": {"uri": f"{URI}@{ONE}"}},
        {"model": {"uri": "s3://bucket/folder"}},
        {"model": {"uri": "builtin://tiny"}},
    ],
)
def test_fixed_revisions_have_no_recorded_commit(spec: dict[str, Any]) -> None:
    assert not moving(a_pool(**spec))
    assert COMMITS not in str(template(**spec))


def test_other_lines_of_a_download_are_ignored() -> None:
    pool = a_pool(**HF)
    cluster = SimCluster()
    cluster.converge(pool)
    for nonsense in ("", "hf://org/name", f"hf://else/where {ONE}", f"{URI} {ONE} x", "x" * 4096):
        (pod,) = cluster.pods.values()
        pod["status"]["initContainerStatuses"][0]["state"]["terminated"]["message"] = nonsense
        assert kinds(cluster.plan(pool)) == []
