"""Pods, pools and models on a real API server, and a proxy's side of one request, for tests of the picker there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from treeline_epp.extproc.session import SERVICE
from treeline_wire import envoy_pb2 as pb
from treeline_wire import headers as names

from support.control_plane import ControlPlane
from support.epp_io import RunningPicker, until
from support.kube_api import MODELS, PODS, POOLS, own_model, own_pool
from support.proxy import begun, head, whole

RBAC = "/apis/rbac.authorization.k8s.io/v1"
APPLY = "application/merge-patch+json"


@dataclass
class Cluster:
    """A namespace of a real API server. All requests are made in threads: the picker runs in the test's loop."""

    plane: ControlPlane
    namespace: str

    async def request(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        return await asyncio.to_thread(self.plane.request, method, path, body, **options)

    async def create(self, collection: str, obj: dict[str, Any]) -> Any:
        """Create an object; the API server sets its times."""
        meta = {k: v for k, v in obj["metadata"].items() if k != "creationTimestamp"}
        return await self.request("POST", collection.format(self.namespace), {**obj, "metadata": meta})

    async def delete(self, collection: str, name: str, **options: Any) -> None:
        await self.request("DELETE", f"{collection.format(self.namespace)}/{name}", options or None)

    async def merge(self, collection: str, name: str, patch: dict[str, Any], sub: str = "") -> None:
        path = f"{collection.format(self.namespace)}/{name}{sub}"
        await self.request("PATCH", path, patch, content_type=APPLY)

    async def create_pool(self, name: str, port: int, **fields: Any) -> None:
        await self.create(POOLS, own_pool(name, port=port, **fields))

    async def create_model(self, name: str, pool: str, **spec: Any) -> None:
        await self.create(MODELS, own_model(name, pool, **spec))

    async def create_pod(self, name: str, labels: dict[str, str], *, ip: str = "127.0.0.1") -> None:
        """Create a pod on a node that does not exist; the test reports it as running and ready."""
        spec = {
            "nodeName": "nowhere",
            "automountServiceAccountToken": False,
            "containers": [{"name": "runtime", "image": "none"}],
        }
        obj = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}
        await self.request("POST", PODS.format(self.namespace), obj)
        await self.set_status(name, ip=ip)

    async def set_status(self, name: str, *, ip: str = "127.0.0.1", ready: bool = True, restarts: int = 0) -> None:
        """Report a pod's status, as a kubelet does."""
        container = {
            "name": "runtime",
            "image": "none",
            "imageID": "",
            "ready": ready,
            "restartCount": restarts,
        }
        status = {
            "phase": "Running",
            "podIP": ip,
            "podIPs": [{"ip": ip}],
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
            "containerStatuses": [container],
        }
        await self.merge(PODS, name, {"status": status}, "/status")

    async def grant(self, user: str, rules: Sequence[dict[str, Any]]) -> None:
        """Bind a Role with these rules to a user."""
        base = f"{RBAC}/namespaces/{self.namespace}"
        meta = {"name": user}
        await self.request("POST", f"{base}/roles", {"metadata": meta, "rules": list(rules)})
        ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": user}
        subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}
        body = {"metadata": meta, "roleRef": ref, "subjects": [subject]}
        await self.request("POST", f"{base}/rolebindings", body)

    def flags(self, *which: str, user: str = "") -> tuple[str, ...]:
        config = self.plane.kubeconfig(user) if user else self.plane.admin
        which = which or ("--gateway", "treeline")
        return ("--kubeconfig", str(config), "--pool-namespace", self.namespace, *which)


async def listed(picker: RunningPicker) -> dict[str, dict[str, Any]]:
    """Return the picker's endpoints by name."""
    pools = (await picker.get("/endpoints")).json()["pools"]
    return {endpoint["name"]: endpoint for pool in pools.values() for endpoint in pool["endpoints"]}


async def listed_so(picker: RunningPicker, name: str, **fields: Any) -> None:
    """Wait until an endpoint is listed with these fields; without fields, until it is not listed."""

    async def so() -> bool:
        found = (await listed(picker)).get(name)
        return found is None if not fields else found is not None and fields.items() <= found.items()

    await until(so, f"{name} is {fields or 'gone'}")


async def models(picker: RunningPicker, pool: str) -> set[str]:
    """Return the names that can be requested from a pool."""
    pools = (await picker.get("/endpoints")).json()["pools"]
    return set(pools.get(pool, {"models": ()})["models"])


async def asked(
    picker: RunningPicker,
    model: str,
    *,
    prompt: str = "hello",
    request_id: str = "",
    answered: bool = False,
    secure: bytes | None = None,
) -> str | int:
    """Send one request as a proxy does. Return the first destination, or the status of the refusal. Then the client
    leaves, unless the response is to begin (`answered`). `secure` is the certificate to trust, for a picker that serves
    TLS."""
    address = f"127.0.0.1:{picker.options.grpc_port}"
    if secure is None:
        channel = grpc.aio.insecure_channel(address)
    else:
        options = (("grpc.ssl_target_name_override", "localhost"),)
        channel = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(secure), options)
    async with channel:
        call = channel.stream_stream(
            f"/{SERVICE}/Process",
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )()
        await call.write(head({":path": "/v1/completions", ":method": "POST", "x-request-id": request_id}))
        reply = await call.read()
        await call.write(whole(json.dumps({"model": model, "prompt": prompt}).encode()))
        reply = await call.read()
        if answered:
            await call.write(begun())
            await call.read()
        call.cancel()
    if reply.WhichOneof("response") == "immediate_response":
        return int(reply.immediate_response.status.code)
    (option,) = reply.request_body.response.header_mutation.set_headers
    assert option.header.key == names.DESTINATION
    return str(option.header.raw_value.decode().split(",")[0])
