"""Statuses on a real API server about objects that the operator does not watch, and about objects being deleted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from support.kube_proxy import KubeProxy
from support.operator_run import DEPLOYMENTS, POOLS, Room, condition, operator
from treeline_operator.controller import warnings

pytestmark = pytest.mark.deep

EVENTS = "/api/v1/namespaces/{}/events"
PODS = "/api/v1/namespaces/{}/pods"
SERVICES = "/api/v1/namespaces/{}/services"
HELD = {"metadata": {"finalizers": ["example.com/held"]}}


async def runtime_pod(room: Room) -> Any:
    pods = await room.items(PODS)
    return next((pod for pod in pods if "treeline.dev/pool" in pod["metadata"]["labels"]), None)


async def reason(room: Room, kind: str, wanted: str) -> Any:
    found = condition(await room.pool("a"), kind)
    return found if found.get("reason") == wanted else None


async def test_a_cause_known_only_from_an_event_is_in_the_status(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "_EVERY_S", 0.3)
    async with operator(room.plane.admin, room.namespace):
        await room.create_pool("a")
        pod = await room.until(lambda: runtime_pod(room), "a pod")
        about = {name: pod["metadata"][name] for name in ("name", "namespace", "uid")}
        text = 'MountVolume.SetUp failed for volume "weights" : configmap "weights" not found'
        event = {
            "metadata": {"name": "mount.1", "namespace": room.namespace},
            "involvedObject": {"apiVersion": "v1", "kind": "Pod", **about},
            "type": "Warning",
            "reason": "FailedMount",
            "message": text,
            "lastTimestamp": "2026-11-20T12:00:00Z",
        }
        await room.request("POST", EVENTS.format(room.namespace), event)
        told = await room.until(lambda: reason(room, "WorkloadsReady", "ConfigError"), "the Event to be read")
        assert 'configmap "weights" not found' in told["message"]


async def test_pods_wait_for_the_keys_that_they_mount(room: Room, tmp_path: Path) -> None:
    written: list[str] = []

    def note(request: web.Request) -> None:
        if request.method in ("POST", "PATCH"):
            written.append(request.path.rpartition("/namespaces/")[2].partition("/")[2])

    async with KubeProxy(room.plane.admin, tmp_path) as proxy:
        proxy.fault = note
        async with operator(proxy.kubeconfig, room.namespace):
            await room.create_pool("a")
            await room.until(lambda: runtime_pod(room), "a pod")
    made = next(path for path in written if path.startswith("deployments/a-"))
    assert "secrets" in written[: written.index(made)]


@pytest.mark.parametrize("propagation", ["Background", "Foreground"])
async def test_a_pool_awaiting_deletion_says_so_and_creates_nothing(room: Room, propagation: str) -> None:
    async with operator(room.plane.admin, room.namespace, resync_s=0.5):
        await room.create_pool("a")
        await room.until(lambda: everything(room), "all that the operator makes")
        await room.patch(f"{POOLS}/a", HELD)
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": propagation}
        await room.request("DELETE", f"{POOLS.format(room.namespace)}/a", body)
        for kind, status in (("Ready", "False"), ("Progressing", "True")):
            told = await room.until(lambda kind=kind: reason(room, kind, "Deleting"), f"{kind} to say so")
            assert told["status"] == status
        if propagation == "Background":
            await room.request("DELETE", f"{SERVICES.format(room.namespace)}/a-pods")
        await room.until(lambda: gone(room), "the children to go")
        before = await room.items(DEPLOYMENTS)
        await room.patch(f"{POOLS}/a", {"spec": {"replicas": 5}})

        async def seen() -> bool:
            pool = await room.pool("a")
            return bool(pool["status"]["observedGeneration"] == pool["metadata"]["generation"])

        await room.until(seen, "the operator to have looked again")
        assert not await room.get(f"{SERVICES}/a-pods")
        after = await room.items(DEPLOYMENTS)
        assert {d["metadata"]["name"] for d in after} <= {d["metadata"]["name"] for d in before}
        await room.patch(f"{POOLS}/a", {"metadata": {"finalizers": None}})


async def everything(room: Room) -> bool:
    """Return whether a runtime pod and the gateway's last object exist: the two are created concurrently."""
    return bool(await runtime_pod(room)) and await room.get(f"{DEPLOYMENTS}/treeline-edge") is not None


async def gone(room: Room) -> bool:
    return await room.get(f"{SERVICES}/a-pods") is None
