"""Adapters of InferenceModels against a real API server; the test answers for the pods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from support.kube_proxy import KubeProxy, status
from support.operator_run import MODELS, PODS, Room, condition, operator, ready, settled
from treeline_wire.labels import ADAPTERS
from treeline_wire.live_adapters import AdapterReport, wishes_of

pytestmark = [pytest.mark.integration, pytest.mark.deep]


class Pods:
    """What pods log of their adapters: those of a uri in `broken` are not loaded, a pod in `silent` says nothing."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.broken: dict[str, str] = {}
        self.silent: set[str] = set()

    def __call__(self, request: web.Request) -> web.Response | None:
        *_, kind, name, sub = request.path.split("/")
        if (kind, sub) != ("pods", "log") or request.query.get("container") != "adapters":
            return None
        if name in self.silent:
            return status(500, "InternalError")
        pod = self.room.plane.request("GET", f"{PODS.format(self.room.namespace)}/{name}")
        wishes = wishes_of(pod["metadata"]["annotations"][ADAPTERS]).values()
        good = {wish.name: "d1" for wish in wishes if wish.uri not in self.broken}
        bad = {wish.name: self.broken[wish.uri] for wish in wishes if wish.uri in self.broken}
        return web.Response(body=b"WARNING a line\n" + msgspec.json.encode(AdapterReport(good, bad)))


async def annotations(room: Room) -> dict[str, list[str]]:
    """Return the sources that each runtime pod is asked for."""
    found = {pod["metadata"]["name"]: pod["metadata"].get("annotations", {}) for pod in await room.items(PODS)}
    return {name: [wish.uri for wish in wishes_of(a[ADAPTERS]).values()] for name, a in found.items() if ADAPTERS in a}


async def told(room: Room, reason: str) -> dict[str, Any]:
    """Return the model's status once its adapter's condition has this reason."""

    async def look() -> Any:
        found = await room.get(f"{MODELS}/sql")
        fresh = condition(found, "AdapterLoaded").get("observedGeneration") == found["metadata"]["generation"]
        return found["status"] if fresh and condition(found, "AdapterLoaded")["reason"] == reason else None

    status_: dict[str, Any] = await room.until(look, f"the adapter to be {reason}")
    return status_


async def asked(room: Room, *uris: str) -> None:
    async def look() -> bool:
        return {tuple(sorted(found)) for found in (await annotations(room)).values()} == {tuple(sorted(uris))}

    await room.until(look, f"all pods to be asked for {uris}")


async def test_an_adapter_comes_changes_fails_and_goes_without_a_rollout(room: Room, tmp_path: Path) -> None:
    async with KubeProxy(room.plane.admin, tmp_path) as proxy:
        proxy.fault = pods = Pods(room)
        async with operator(proxy.kubeconfig, room.namespace):
            await room.create_pool("a", replicas=2, engine={"lora": {}})
            await settled(room)

            async def runtimes() -> Any:
                found = [pod for pod in await room.items(PODS) if ADAPTERS in pod["metadata"].get("annotations", {})]
                return found if len(found) == 2 else None

            first, second = await room.until(runtimes, "both pods")
            for pod in (first, second):
                await ready(room, pod)
            body = {
                "apiVersion": "treeline.dev/v1alpha1",
                "kind": "InferenceModel",
                "metadata": {"name": "sql"},
                "spec": {"modelName": "sql", "poolRef": {"name": "a"}, "adapter": {"uri": "hf://o/one"}},
            }
            await room.request("POST", MODELS.format(room.namespace), body)
            await asked(room, "hf://o/one")
            one = (await told(room, "AdapterLoaded"))["adapter"]
            assert (one["loaded"], one["wanted"], one["digest"]) == (2, 2, "d1")

            pods.broken = {"hf://o/two": "it has rank 128"}
            await room.patch(f"{MODELS}/sql", {"spec": {"adapter": {"uri": "hf://o/two"}}})
            await asked(room, "hf://o/one", "hf://o/two")
            failing = await told(room, "AdapterFailing")
            assert failing["adapter"]["name"] == one["name"]
            message = failing["conditions"][1]["message"]
            assert f"loaded on 0 of 2 pods: pod {first['metadata']['name']}: it has rank 128" in message

            pods.broken = {}
            two = (await told(room, "AdapterLoaded"))["adapter"]
            assert two["name"] != one["name"]
            await asked(room, "hf://o/two")  # the old one has gone

            # A pod that says nothing is named, and holds up no other.
            pods.silent = {first["metadata"]["name"]}
            await room.patch(f"{MODELS}/sql", {"spec": {"adapter": {"uri": "hf://o/three"}}})
            mute = await told(room, "AdapterFailing")
            assert f"pod {first['metadata']['name']}: it does not answer" in mute["conditions"][1]["message"]
            pods.silent = set()
            await told(room, "AdapterLoaded")

            await room.request("DELETE", f"{MODELS.format(room.namespace)}/sql")
            await asked(room)
            uids = {pod["metadata"]["uid"] for pod in await room.items(PODS)}
            assert {first["metadata"]["uid"], second["metadata"]["uid"]} <= uids, "no rollout"
