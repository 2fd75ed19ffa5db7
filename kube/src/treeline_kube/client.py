"""Objects of a cluster as dicts: server-side apply and the few other requests that Treeline makes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec

from treeline_kube.connection import APPLY, JSON_PATCH, MERGE, ONCE, Call, Connection, Retry
from treeline_kube.errors import NotFound
from treeline_kube.resources import KNOWN, Ref, Resource

Object = dict[str, Any]
_PIECE = 16_384  # kubelets keep longer lines in pieces of this, each of which counts as one


class Client(Connection):
    """The objects of a cluster, as dicts. Every method raises KubeError.

    Objects are written as `field_manager`, statuses as `status_manager`.
    """

    def __init__(
        self,
        *arguments: Any,
        field_manager: str = "treeline",
        status_manager: str = "treeline-status",
        **options: Any,
    ) -> None:
        super().__init__(*arguments, user_agent=field_manager, **options)
        self.field_manager = field_manager
        self.status_manager = status_manager
        self._resources = dict(KNOWN)

    # Objects

    async def apply(self, obj: Object, *, field_manager: str = "", subresource: str = "") -> Object:
        """Server-side apply, by force; the object as it is afterwards.

        What we applied before and leave out now is removed. Fields that the server does not know are an error, Invalid.
        """
        manager = field_manager or self.field_manager
        query = [("fieldManager", manager), ("fieldValidation", "Strict"), ("force", "true")]
        resource, path = await self._address(Ref.of(obj), subresource)
        return await self._object(Call("patch", resource, path, query, obj, APPLY))

    async def apply_status(self, obj: Object) -> Object:
        """Server-side apply of the status alone."""
        return await self.apply(obj, field_manager=self.status_manager, subresource="status")

    async def create(
        self,
        obj: Object,
        *,
        guarded: bool = True,
        retry: Retry | None = None,
    ) -> Object:
        """Create the object; raises AlreadyExists if the name is taken. No retry if the server may have created it."""
        meta = obj["metadata"]
        resource = await self.resource(obj["apiVersion"], obj["kind"])
        call = Call(
            "create",
            resource.plural,
            resource.path(meta.get("namespace", "")),
            [("fieldManager", self.field_manager), ("fieldValidation", "Strict")],
            obj,
            idempotent=False,
            guarded=guarded,
            retry=retry,
        )
        return await self._object(call)

    async def get(self, ref: Ref, *, retry: Retry | None = None) -> Object:
        """The object, from the API server's store."""
        resource, path = await self._address(ref)
        return await self._object(Call("get", resource, path, retry=retry))

    async def list(
        self,
        api_version: str,
        kind: str,
        namespace: str | None = None,
        label_selector: str | None = None,
        *,
        field_selector: str | None = None,
        page: int = 500,
    ) -> AsyncIterator[Object]:
        """List a kind page by page, from one snapshot. Raises Gone if the snapshot expires meanwhile."""
        resource = await self.resource(api_version, kind)
        query = [("limit", str(page))]
        query += [("labelSelector", label_selector)] if label_selector else []
        query += [("fieldSelector", field_selector)] if field_selector else []
        more = ""
        while True:
            pages = [*query, ("continue", more)] if more else query
            reply = await self._object(Call("list", resource.plural, resource.path(namespace or ""), pages))
            for item in reply["items"]:
                # items of a list have no apiVersion and kind
                yield {"apiVersion": api_version, "kind": kind, **item}
            more = reply["metadata"].get("continue", "")
            if not more:
                return

    async def delete(self, ref: Ref, *, uid: str) -> None:
        """Delete exactly this object: Conflict if another one has its name, NotFound if none has."""
        body: Object = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid},
            "propagationPolicy": "Background",
        }
        resource, path = await self._address(ref)
        await self.request(Call("delete", resource, path, body=body))

    async def scale(self, ref: Ref, uid: str, replicas: int) -> Object:
        """Set `spec.replicas` of exactly this object and nothing else: Conflict if another one has its name."""
        return await self.patch_merge(ref, {"metadata": {"uid": uid}, "spec": {"replicas": replicas}})

    async def scale_by_subresource(self, ref: Ref, resource_version: str, replicas: int) -> None:
        """Set replicas through `/scale`, as autoscalers do: this needs no right to the rest of the spec. Raises
        Conflict if the object has changed since that version; the API server does not check the uid here for custom
        resources."""
        _, path = await self._address(ref, "scale")
        plural = (await self.resource(ref.api_version, ref.kind)).plural
        query = [("fieldManager", self.field_manager)]
        body = {"metadata": {"resourceVersion": resource_version}, "spec": {"replicas": replicas}}
        await self.request(Call("patch", f"{plural}/scale", path, query, body, MERGE))

    async def update(self, obj: Object, *, guarded: bool = True, retry: Retry | None = None) -> Object:
        """Replace the object whole: Conflict unless it still has the resourceVersion given."""
        resource, path = await self._address(Ref.of(obj))
        return await self._object(Call("update", resource, path, body=obj, guarded=guarded, retry=retry))

    async def replace_spec(self, ref: Ref, resource_version: str, spec: Object) -> Object:
        """Replace the `spec` as a whole: Conflict unless the object still has this version."""
        resource, path = await self._address(ref)
        body = [
            {"op": "replace", "path": "/metadata/resourceVersion", "value": resource_version},
            {"op": "replace", "path": "/spec", "value": spec},
        ]
        query = [("fieldManager", self.field_manager)]
        return await self._object(Call("patch", resource, path, query, body, JSON_PATCH))

    async def patch_merge(self, ref: Ref, body: Object) -> Object:
        """JSON merge patch."""
        resource, path = await self._address(ref)
        query = [("fieldManager", self.field_manager)]
        return await self._object(Call("patch", resource, path, query, body, MERGE))

    async def logs(self, namespace: str, pod: str, container: str, *, tail_lines: int) -> str:
        """The end of a container's log. Kubelets cut what exceeds a limit at its end, so all of these lines fit."""
        _, path = await self._address(Ref("v1", "Pod", namespace, pod), "log")
        query = [("container", container), ("tailLines", str(tail_lines)), ("limitBytes", str(tail_lines * _PIECE))]
        answer = await self.request(Call("get", "pods/log", path, query, accept="*/*", retry=ONCE))
        return answer.body.decode(errors="replace")

    # Addresses

    async def resource(self, api_version: str, kind: str) -> Resource:
        """The address of a kind. Raises NotFound if the cluster does not have it."""
        known = self._resources.get((api_version, kind))
        if known is None:
            prefix = "/apis" if "/" in api_version else "/api"
            reply = await self._object(Call("get", "apis", f"{prefix}/{api_version}"))
            for item in reply["resources"]:
                if "/" not in item["name"]:
                    entry = Resource(api_version, item["kind"], item["name"], item["namespaced"])
                    self._resources[api_version, item["kind"]] = entry
            known = self._resources.get((api_version, kind))
        if known is None:
            raise NotFound(f"the cluster has no {kind} in {api_version}", code=404)
        return known

    async def _address(self, ref: Ref, subresource: str = "") -> tuple[str, str]:
        resource = await self.resource(ref.api_version, ref.kind)
        name = f"{resource.plural}/{subresource}" if subresource else resource.plural
        return name, resource.path(ref.namespace, ref.name, subresource)

    async def _object(self, call: Call) -> Object:
        decoded: Object = msgspec.json.decode((await self.request(call)).body)
        return decoded
