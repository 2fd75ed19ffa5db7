"""A pool's volume claims for downloads, and its way to the internet."""

from __future__ import annotations

from typing import Any

from support.pool_world import HF, SimCluster, a_pool, kinds, settled
from treeline_operator.actions import Apply, Delete
from treeline_operator.api.pool import InferencePool


def test_egress_is_open_only_during_a_download() -> None:
    pool = a_pool(**HF, replicas=2)
    cluster = SimCluster()

    def is_open() -> bool:
        return any(ref.name == "tiny-download" for ref in cluster.objects)

    cluster.do(cluster.plan(pool))
    cluster.controllers()
    assert is_open()
    cluster.make_ready(next(iter(cluster.pods)))
    cluster.do(cluster.plan(pool))
    assert is_open()
    cluster.make_ready()
    plan = cluster.plan(pool)
    assert kinds(plan) == ["Delete NetworkPolicy tiny-download"]
    cluster.do(plan)
    plan = cluster.plan(a_pool(**HF, replicas=3))
    assert kinds(plan)[0] == "Apply NetworkPolicy tiny-download"


def test_a_claim_only_grows_and_keeps_what_cannot_change() -> None:
    def of(**cache: Any) -> InferencePool:
        return a_pool(model={"uri": "hf://org/name", "cache": cache})

    cluster = settled(of(size="5Gi"))
    (grown,) = cluster.plan(of(size="10Gi")).actions
    assert isinstance(grown, Apply)
    assert grown.object["spec"]["resources"]["requests"]["storage"] == "10Gi"
    smaller = cluster.plan(of(size="1Gi", accessModes=["ReadWriteMany"], storageClassName="fast"))
    assert all(not isinstance(a, Delete) for a in smaller.actions)
    for action in smaller.actions:
        assert isinstance(action, Apply)
        assert action.object["spec"]["accessModes"] == ["ReadWriteOnce"]
        assert action.object["spec"]["resources"]["requests"]["storage"] == "5Gi"
    assert {note.split(" keeps its ")[1].split()[0] for note in smaller.notes if "keeps" in note} == {
        "access",
        "class",
        "size",
    }


def test_a_claim_of_one_node_for_many_pods_is_reported() -> None:
    plan = SimCluster().plan(a_pool(replicas=2, model={"uri": "hf://org/name", "cache": {"size": "5Gi"}}))
    assert any("claim tiny-models is ReadWriteOnce: all 2 pods must be on one node" in n for n in plan.notes)
    shared = {"size": "5Gi", "accessModes": ["ReadWriteMany"]}
    plan = SimCluster().plan(a_pool(replicas=2, model={"uri": "hf://org/name", "cache": shared}))
    assert plan.notes == ()


def test_a_compile_cache_claim_is_created_grows_and_survives_its_removal_from_the_spec() -> None:
    small, large = ({"engine": {"cache": {"size": size}}} for size in ("5Gi", "20Gi"))
    cluster = settled(a_pool(**small))
    made = cluster.get("PersistentVolumeClaim", "tiny-cache")
    assert made["spec"]["resources"]["requests"]["storage"] == "5Gi"
    before = set(cluster.deployments())
    cluster.converge(a_pool(**large))
    claim = cluster.get("PersistentVolumeClaim", "tiny-cache")
    assert claim["spec"]["resources"]["requests"]["storage"] == "20Gi"
    assert set(cluster.deployments()) == before, "the claim's size is no matter of the pods"
    cluster.converge(a_pool())
    assert cluster.get("PersistentVolumeClaim", "tiny-cache") == claim


def test_a_claim_that_exists_is_used_and_never_made() -> None:
    plan = SimCluster().plan(a_pool(model={"uri": "hf://org/name", "cache": {"claimName": "theirs"}}))
    assert not any("PersistentVolumeClaim" in kind for kind in kinds(plan))
    pod = plan.actions[-1].object["spec"]["template"]["spec"]  # type: ignore[union-attr]
    assert {"name": "models", "persistentVolumeClaim": {"claimName": "theirs"}} in pod["volumes"]
