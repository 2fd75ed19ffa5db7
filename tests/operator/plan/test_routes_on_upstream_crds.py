"""An API server with the real Gateway API definitions accepts a pool's objects as they are; its defaults are no
drift."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from support.control_plane import ROOT, ControlPlane, control_plane_or_skip
from support.pool_world import SimCluster, a_pool
from treeline_operator.actions import Apply
from treeline_operator.plan.routes import ROUTE, UPSTREAM
from treeline_operator.world import Platform

pytestmark = [pytest.mark.integration, pytest.mark.deep]

PLURALS = {"HTTPRoute": "httproutes", "InferencePool": "inferencepools"}
PARENT = {"name": "front", "namespace": "infra", "sectionName": "https", "port": 443}
GATEWAYS: dict[str, dict[str, Any]] = {
    "plain": {"parentRefs": [{"name": "front"}]},
    "full": {"parentRefs": [PARENT, {"name": "back"}], "hostnames": ["llm.example.com", "*.example.org"]},
}


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """An API server for these tests alone: the others have no Gateway API."""
    plane = control_plane_or_skip(controllers=())
    plane.start()
    crds = ROOT / "e2e/gateway_api/crds"
    plane.install_crds(crds / "gateway-api", crds / "inference-extension")
    yield plane
    plane.stop()


@pytest.mark.parametrize("first", [True, False], ids=["oldest", "by-model"])
@pytest.mark.parametrize("name", GATEWAYS)
def test_the_api_server_accepts_a_pools_objects_unchanged(name: str, first: bool, plane: ControlPlane) -> None:
    pool = a_pool("tiny", metadata={"namespace": "default"}, gateway=GATEWAYS[name])
    cluster = SimCluster(replace(Platform(), apis=frozenset({ROUTE, UPSTREAM})))
    if not first:
        model = {"uri": "builtin://tiny", "name": "older"}
        cluster.others = (a_pool("older", uid="older", model=model, gateway=GATEWAYS["plain"]),)
    for action in cluster.plan(pool).actions:
        assert isinstance(action, Apply)
        if action.ref.kind in PLURALS:
            cluster.objects[action.ref] = _dry_run(plane, action.object)
    assert sorted(ref.kind for ref in cluster.objects) == sorted(PLURALS)
    again = [action for action in cluster.plan(pool).actions if action.ref.kind in PLURALS]
    assert [(a.ref.kind, getattr(a, "drift", ())) for a in again] == []


def _dry_run(plane: ControlPlane, obj: dict[str, Any]) -> dict[str, Any]:
    version, meta = obj["apiVersion"], obj["metadata"]
    path = f"/apis/{version}/namespaces/{meta['namespace']}/{PLURALS[obj['kind']]}/{meta['name']}"
    query = "fieldManager=treeline-operator&force=true&dryRun=All&fieldValidation=Strict"
    made = plane.request("PATCH", f"{path}?{query}", obj, content_type="application/apply-patch+yaml")
    return {**made, "apiVersion": version, "kind": obj["kind"]}
