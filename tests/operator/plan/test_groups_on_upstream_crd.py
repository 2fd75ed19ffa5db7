"""An API server with LeaderWorkerSet's own definition accepts a pool's groups as they are; defaults are no drift."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.control_plane import ROOT, ControlPlane, control_plane_or_skip
from support.pool_world import EVERY_API, SimCluster, a_pool
from treeline_operator.actions import Apply
from treeline_operator.world import Platform

pytestmark = [pytest.mark.integration, pytest.mark.deep]

GPUS = {"type": "nvidia", "count": 8, "nodes": 2, "class": "NVIDIA-H100-80GB-HBM3"}
POOLS: dict[str, dict[str, Any]] = {
    "cpu": {"accelerator": {"nodes": 2}, "engine": {"tensorParallel": 2}},
    "gpu": {"accelerator": GPUS, "model": {"uri": "hf://org/name", "cache": {"size": "1Gi"}}},
    "fragment": {
        "accelerator": GPUS,
        "template": {
            "spec": {
                "hostNetwork": True,
                "tolerations": [{"key": "a", "operator": "Exists"}],
                "containers": [{"name": "runtime", "env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}],
            }
        },
    },
}


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """An API server for these tests alone: the others have no LeaderWorkerSet."""
    plane = control_plane_or_skip(controllers=())
    plane.start()
    plane.install_crds(ROOT / "e2e/crds/leader-worker-set")
    yield plane
    plane.stop()


@pytest.mark.parametrize("name", POOLS)
def test_the_api_server_accepts_groups_unchanged(name: str, plane: ControlPlane) -> None:
    pool = a_pool("tiny", metadata={"namespace": "default"}, **POOLS[name])
    cluster = SimCluster(Platform(apis=EVERY_API))
    (made,) = (action for action in cluster.plan(pool).actions if action.ref.kind == "LeaderWorkerSet")
    assert isinstance(made, Apply)
    path = f"/apis/leaderworkerset.x-k8s.io/v1/namespaces/default/leaderworkersets/{made.ref.name}"
    query = "fieldManager=treeline-operator&force=true&dryRun=All&fieldValidation=Strict"
    stored = plane.request("PATCH", f"{path}?{query}", made.object, content_type="application/apply-patch+yaml")
    cluster.objects[made.ref] = {**stored, "apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet"}
    again = [action for action in cluster.plan(pool).actions if action.ref.kind == "LeaderWorkerSet"]
    assert [(action.ref.kind, getattr(action, "drift", ())) for action in again] == []


@pytest.mark.parametrize("part", ["leaderTemplate", "workerTemplate"])
@pytest.mark.parametrize("name", POOLS)
def test_the_api_server_accepts_the_templates_in_stateful_sets(name: str, part: str, plane: ControlPlane) -> None:
    """The definition does not check pods in full: LeaderWorkerSet makes StatefulSets of them later."""
    pool = a_pool("tiny", metadata={"namespace": "default"}, **POOLS[name])
    (made,) = (a for a in SimCluster(Platform(apis=EVERY_API)).plan(pool).actions if a.ref.kind == "LeaderWorkerSet")
    assert isinstance(made, Apply)
    template = made.object["spec"]["leaderWorkerTemplate"][part]
    match = {"matchLabels": template["metadata"]["labels"]}
    meta = {"name": "one", "namespace": "default"}
    maker = {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": meta}
    spec = {"serviceName": "one", "selector": match, "template": template}
    path = "/apis/apps/v1/namespaces/default/statefulsets?dryRun=All&fieldValidation=Strict"
    plane.request("POST", path, {**maker, "spec": spec})
