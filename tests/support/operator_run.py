"""Runs operators in the test's own event loop, and waits for their effects."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from treeline_operator.controller.informer import Timing
from treeline_operator.controller.kinds import CHILDREN
from treeline_operator.controller.lease import LeaseTiming
from treeline_operator.controller.run import Options, operate
from treeline_operator.world import Platform

from support.control_plane import ControlPlane
from support.kube_proxy import KubeProxy

QUICK = Timing(list_s=3.0, absent_s=1.0, backoff_s=(0.05, 0.5))
SHORT = LeaseTiming(2.0, 1.4, 0.25)

POOLS = "/apis/treeline.dev/v1alpha1/namespaces/{}/inferencepools"
MODELS = "/apis/treeline.dev/v1alpha1/namespaces/{}/inferencemodels"
PODS = "/api/v1/namespaces/{}/pods"
DEPLOYMENTS = "/apis/apps/v1/namespaces/{}/deployments"
SERVICES = "/api/v1/namespaces/{}/services"
RESOURCES = [watched.resource for watched in CHILDREN]


class Room:
    """A namespace of a control plane, and an administrator's requests that do not block the loop."""

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        self.plane = plane
        self.namespace = namespace

    async def request(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        return await asyncio.to_thread(self.plane.request, method, path, body, **options)

    async def get(self, path: str) -> Any:
        """Return the decoded answer, or None for a 404."""
        reply = await asyncio.to_thread(self.plane._http.get, path.format(self.namespace))
        return None if reply.status_code == 404 else reply.json()

    async def raw(self, method: str, body: str) -> int:
        """Send a body for pools that none of our clients would send; return the status."""
        send = partial(self.plane._http.request, headers={"Content-Type": "application/json"}, content=body)
        return (await asyncio.to_thread(send, method, POOLS.format(self.namespace))).status_code

    async def items(self, path: str) -> list[Any]:
        """Return the objects of a collection."""
        return list((await self.get(path))["items"])

    async def create_pool(self, name: str, **spec: Any) -> Any:
        body = {
            "apiVersion": "treeline.dev/v1alpha1",
            "kind": "InferencePool",
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": {"model": {"uri": "builtin://tiny"}, **spec},
        }
        return await self.request("POST", POOLS.format(self.namespace), body)

    async def patch(self, path: str, body: Any, manager: str = "somebody", kind: str = "merge") -> Any:
        where = f"{path.format(self.namespace)}?fieldManager={manager}"
        return await self.request("PATCH", where, body, content_type=f"application/{kind}-patch+json")

    async def pool(self, name: str) -> Any:
        return await self.get(f"{POOLS}/{name}")

    async def until(self, condition: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
        """Return the first true answer of ``condition``, which may be asynchronous."""
        deadline = time.monotonic() + seconds
        while True:
            found = condition()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return found
            if time.monotonic() > deadline:
                state = await asyncio.to_thread(
                    self.plane.kubectl, "-n", self.namespace, "get", "tlpool,deploy,svc,pod,cm,events"
                )
                raise AssertionError(f"waited {seconds} s for {what}:\n{state}")
            await asyncio.sleep(0.05)


def condition(obj: Any, kind: str) -> dict[str, Any]:
    """Return a condition of an object; empty if it has none of that type."""
    for one in ((obj or {}).get("status") or {}).get("conditions", ()):
        if one["type"] == kind:
            return dict(one)
    return {}


async def ready(room: Room, pod: Any) -> None:
    """Report a healthy pod's status, as a kubelet does."""
    name = pod["metadata"]["name"]
    running = {"state": {"running": {"startedAt": "2026-11-01T00:00:00Z"}}, "ready": True, "started": True}
    status_ = {
        "phase": "Running",
        "podIP": "127.0.0.1",
        "podIPs": [{"ip": "127.0.0.1"}],
        "conditions": [{"type": kind, "status": "True"} for kind in ("PodScheduled", "ContainersReady", "Ready")],
        "containerStatuses": [
            {"name": c["name"], "image": c["image"], "imageID": "", "restartCount": 0, **running}
            for c in pod["spec"]["containers"]
        ],
    }
    await room.patch(f"{PODS}/{name}/status", {"status": status_}, kind="strategic-merge", manager="kubelet")
    if pod["metadata"]["labels"].get("treeline.dev/component") == "edge":
        await _lead_to(room, name)


async def _lead_to(room: Room, pod: str) -> None:
    """Write an EndpointSlice of the gateway's Service. Its controller makes none for pods without a node."""
    service = (await room.get(f"{SERVICES}/treeline-gateway"))["metadata"]
    owner = {"apiVersion": "v1", "kind": "Service", "name": service["name"], "uid": service["uid"]}
    labels = {**service["labels"], "kubernetes.io/service-name": service["name"]}
    body = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": pod, "labels": labels, "ownerReferences": [owner]},
        "addressType": "IPv4",
        "endpoints": [{"addresses": ["10.0.0.1"], "conditions": {"ready": True}}],
        "ports": [{"name": "http", "port": 8080}],
    }
    await room.request("POST", f"/apis/discovery.k8s.io/v1/namespaces/{room.namespace}/endpointslices", body)


@asynccontextmanager
async def operator(kubeconfig: Path, namespace: str, **options: Any) -> AsyncIterator[asyncio.Task[int]]:
    """Run an operator of one namespace, with its lease in it if it elects; it is stopped at the end if it still runs.
    The task's result is the exit status."""
    stop = asyncio.Event()
    settings: dict[str, Any] = {
        "identity": "one",
        "namespaces": (namespace,),
        "platform": Platform(operator_namespace=namespace),
        "leader_elect": False,
        "lease": SHORT,
        "host": "127.0.0.1",
        "health_port": 0,
        "metrics_port": 0,
        "kubeconfig": kubeconfig,
        "timing": QUICK,
        "shutdown_s": 2.0,
    }
    task = asyncio.create_task(operate(Options(**(settings | options)), stop))
    try:
        yield task
    finally:
        if not task.done():
            stop.set()
            await asyncio.wait([task], timeout=60)
            task.cancel()


async def runtime(room: Room, pool: str = "a") -> Any:
    """Return the Deployment of a pool's revision."""
    for deployment in await room.items(DEPLOYMENTS):
        if deployment["metadata"]["labels"].get("treeline.dev/pool") == pool:
            return deployment
    return None


async def settled(room: Room, pool: str = "a") -> Any:
    """Wait until the children exist and the status covers them."""

    async def look() -> Any:
        found, deployment = await room.pool(pool), await runtime(room, pool)
        edge = await room.get(f"{DEPLOYMENTS}/treeline-edge")
        told = condition(found, "Ready").get("observedGeneration") == found["metadata"]["generation"]
        return found if deployment and edge and told else None

    return await room.until(look, f"the children of pool {pool}")


async def versions(room: Room) -> dict[str, str]:
    """Return the generation of every child that has one; its resourceVersion otherwise."""
    found = {}
    for resource in RESOURCES:
        if resource.kind == "Pod":  # controllers make them
            continue
        for obj in await room.items(resource.path(room.namespace)):
            meta = obj["metadata"]
            found[f"{resource.plural}/{meta['name']}"] = str(meta.get("generation") or meta["resourceVersion"])
    return found


async def quiet(proxy: KubeProxy) -> None:
    """Wait until nothing was written for half a second."""
    last, since = -1, time.monotonic()
    while time.monotonic() - since < 0.5:
        if proxy.writes.total() != last:
            last, since = proxy.writes.total(), time.monotonic()
        await asyncio.sleep(0.05)
