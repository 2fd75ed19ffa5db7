"""The operator works on while its view of a real API server shrinks and grows."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.operator_run import DEPLOYMENTS, POOLS, Room, operator
from support.rbac_audit import RBAC, Grants, rules_of
from treeline_tools import rbac

pytestmark = [pytest.mark.integration, pytest.mark.deep]

DEFINITION = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/inferencepools.treeline.dev"


async def served(room: Room, pool: str) -> Any:
    """Wait for the Deployment of a pool's revision."""

    async def look() -> Any:
        marks = [d["metadata"]["labels"] for d in await room.items(DEPLOYMENTS)]
        return any(labels.get("treeline.dev/pool") == pool for labels in marks)

    return await room.until(look, f"the Deployment of pool {pool}")


async def serve_definition(room: Room, yes: bool) -> None:
    change = [{"op": "replace", "path": "/spec/versions/0/served", "value": yes}]
    await room.request("PATCH", DEFINITION, change, content_type="application/json-patch+json")


async def test_a_temporarily_unserved_definition_deletes_nothing(room: Room, caplog: pytest.LogCaptureFixture) -> None:
    """The operator deletes nothing: Kubernetes' garbage collector may take owners for gone that are not served."""
    user = f"operator-{room.namespace}"
    Grants(room.plane).bind(user, rules_of(rbac.WATCHED), room.namespace)
    async with operator(room.plane.kubeconfig(user), room.namespace, resync_s=0.5):
        await room.create_pool("a")
        await served(room, "a")
        await room.until(lambda: room.get(f"{DEPLOYMENTS}/treeline-edge"), "Envoy")
        try:
            await serve_definition(room, False)
            await room.until(lambda: "install the CRD" in caplog.text, "the operator to miss it")
            await asyncio.sleep(1.5)  # some resyncs
        finally:
            await serve_definition(room, True)
        await room.until(lambda: room.pool("a"), "the API server to serve it")
        await room.create_pool("b")
        await served(room, "b")
        asked = room.plane.audit_events(user)
        assert not [event for event in asked if event["verb"].startswith("delete")]
        assert any(event["verb"] == "patch" for event in asked), "its requests are in the log"
        await room.request("DELETE", f"{POOLS.format(room.namespace)}/a")
        await room.patch(f"{POOLS}/b", {"spec": {"replicas": 2}})
        await room.until(lambda: wants(room, "b", 2), "the pool that came later to be followed")


async def wants(room: Room, pool: str, replicas: int) -> bool:
    return any(
        d["spec"]["replicas"] == replicas and d["metadata"]["labels"].get("treeline.dev/pool") == pool
        for d in await room.items(DEPLOYMENTS)
    )


async def test_a_deleted_namespace_delays_nothing_in_another(room: Room, caplog: pytest.LogCaptureFixture) -> None:
    gone, user = f"{room.namespace}-gone", f"operator-{room.namespace}"
    await room.request("POST", "/api/v1/namespaces", {"metadata": {"name": gone}})
    for namespace in (room.namespace, gone):
        Grants(room.plane).bind(user, rules_of(rbac.WATCHED), namespace)
    kubeconfig = room.plane.kubeconfig(user)
    both = (room.namespace, gone)
    async with operator(kubeconfig, room.namespace, namespaces=both, resync_s=0.5):
        await room.create_pool("a")
        await served(room, "a")
        await room.request("DELETE", f"{RBAC}/namespaces/{gone}/rolebindings/{user}")
        await room.request("DELETE", f"/api/v1/namespaces/{gone}")
        await room.until(lambda: "check the operator's role" in caplog.text, "the operator to miss its rights")
        await room.create_pool("b")
        await served(room, "b")
    async with operator(kubeconfig, room.namespace, namespaces=both):
        await room.create_pool("c")
        await served(room, "c")
