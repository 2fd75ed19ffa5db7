"""A minimal Kubernetes API server for pickers: discovery, lists and watches of a few kinds in one namespace, leases
that are kept, events that are dropped.

Watches begin where asked, or with everything there is (`sendInitialEvents`, which client-go tries first). Answers are
always JSON, as Kubernetes allows. There is no authentication.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aiohttp import web

NAMESPACE: Final = "conformance"
_CREATED: Final = "2026-01-01T00:00:00Z"
_DELETED: Final = "2026-01-01T01:00:00Z"
_BOOKMARK_S: Final = 30.0


@dataclass(frozen=True)
class Resource:
    """A kind and its path."""

    group: str
    version: str
    plural: str
    kind: str

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version


PODS: Final = Resource("", "v1", "pods", "Pod")
POOLS: Final = Resource("inference.networking.k8s.io", "v1", "inferencepools", "InferencePool")
OBJECTIVES: Final = Resource("inference.networking.x-k8s.io", "v1alpha2", "inferenceobjectives", "InferenceObjective")
REWRITES: Final = Resource(
    "inference.networking.x-k8s.io", "v1alpha2", "inferencemodelrewrites", "InferenceModelRewrite"
)
LEASES: Final = Resource("coordination.k8s.io", "v1", "leases", "Lease")
EVENTS: Final = Resource("", "v1", "events", "Event")
RESOURCES: Final = (PODS, POOLS, OBJECTIVES, REWRITES, LEASES, EVENTS)
_HELD: Final = frozenset({PODS, POOLS})


@dataclass(frozen=True)
class Change:
    """An object before and after a version; None if it does not exist."""

    version: int
    resource: Resource
    before: dict[str, Any] | None
    after: dict[str, Any] | None

    def seen_by(self, request: web.Request) -> bytes:
        """The event for a watch, empty for none: an object that the selector no longer matches counts as deleted."""
        was = self.before is not None and _wanted(request, self.before)
        if self.after is not None and _wanted(request, self.after):
            return _line("MODIFIED" if was else "ADDED", self.after)
        if not was or self.before is None:
            return b""
        meta = self.before["metadata"] | {"resourceVersion": str(self.version)}
        return _line("DELETED", self.before | {"metadata": meta})


class ApiServer:
    """Objects and their watches. `held` delays lists and watches of pods and pools, as before a picker has synced.
    `followed`: set when something has asked for them."""

    def __init__(self) -> None:
        self.held = asyncio.Event()
        self.followed = asyncio.Event()
        self.port = 0
        self._objects: dict[tuple[Resource, str], dict[str, Any]] = {}
        self._log: list[Change] = []
        self._version = 1
        self._changed = asyncio.Event()
        self._runner: web.AppRunner | None = None

    # --- the world --------------------------------------------------------------------------------------------------

    def put(self, resource: Resource, name: str, **fields: Any) -> None:
        """Creates or replaces an object; `fields` are its spec, status, labels, annotations."""
        metadata: dict[str, Any] = {
            "name": name,
            "namespace": NAMESPACE,
            "uid": str(uuid.uuid5(uuid.NAMESPACE_DNS, f"{name}.{resource.plural}")),
            "creationTimestamp": _CREATED,
        }
        metadata |= {key: fields.pop(key) for key in ("labels", "annotations") if key in fields}
        self._store(resource, {"metadata": metadata, **fields})

    def delete(self, resource: Resource, name: str) -> None:
        """Deletes an object, if it exists."""
        gone = self._objects.pop((resource, name), None)
        if gone is not None:
            self._tell(resource, gone, None)

    def mark_deleted(self, resource: Resource, name: str) -> None:
        """Marks an object as being deleted, like a pod that terminates."""
        obj = self._objects[resource, name]
        times = {"deletionTimestamp": _DELETED, "deletionGracePeriodSeconds": 30}
        self._store(resource, {**obj, "metadata": obj["metadata"] | times})

    def _store(self, resource: Resource, obj: dict[str, Any]) -> dict[str, Any]:
        key = resource, obj["metadata"]["name"]
        before = self._objects.get(key)
        self._objects[key] = stored = {**obj, "apiVersion": resource.api_version, "kind": resource.kind}
        self._tell(resource, before, stored)
        return stored

    def _tell(self, resource: Resource, before: dict[str, Any] | None, after: dict[str, Any] | None) -> None:
        self._version += 1
        if (latest := after or before) is not None:
            latest["metadata"] = {**latest["metadata"], "resourceVersion": str(self._version)}
        self._log.append(Change(self._version, resource, before, after))
        self._changed.set()
        self._changed = asyncio.Event()

    # --- the server -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listens on a free loopback port, the same one again after `stop`."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stops, with all watches."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def write_kubeconfig(self, folder: Path) -> Path:
        """Writes a kubeconfig for this server."""
        server = {"server": f"http://127.0.0.1:{self.port}"}
        context = {"cluster": "suite", "user": "suite", "namespace": NAMESPACE}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "suite",
            "contexts": [{"name": "suite", "context": context}],
            "clusters": [{"name": "suite", "cluster": server}],
            "users": [{"name": "suite", "user": {}}],
        }
        path = folder / "kubeconfig"
        path.write_text(json.dumps(config))
        return path

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        parts = request.path.strip("/").split("/")
        if (kinds := _discovery(parts)) is not None:
            return web.json_response(kinds)
        found = _addressed(parts)
        if found is None:
            return _status(404, "NotFound")
        resource, name = found
        if request.method in ("POST", "PUT", "PATCH"):
            return await self._write(request, resource, name)
        if request.method != "GET":
            return _status(200, "")
        if resource in _HELD:
            self.followed.set()
        if resource in _HELD:
            await self.held.wait()
        if name:
            obj = self._objects.get((resource, name))
            return _status(404, "NotFound") if obj is None else web.json_response(obj)
        if request.query.get("watch") in ("true", "1"):
            return await self._watch(request, resource)
        items = [obj for (kind, _), obj in self._objects.items() if kind == resource and _wanted(request, obj)]
        meta = {"resourceVersion": str(self._version)}
        body = {"kind": f"{resource.kind}List", "apiVersion": resource.api_version, "metadata": meta, "items": items}
        return web.json_response(body)

    async def _write(self, request: web.Request, resource: Resource, name: str) -> web.Response:
        """Keeps leases, and pretends to accept everything else."""
        obj = json.loads(await request.read() or b"{}")
        if resource != LEASES or not isinstance(obj.get("metadata"), dict):
            return web.json_response(obj, status=201 if request.method == "POST" else 200)
        obj["metadata"].setdefault("name", name)
        if request.method == "POST" and (resource, obj["metadata"]["name"]) in self._objects:
            return _status(409, "AlreadyExists")
        return web.json_response(self._store(resource, obj), status=201 if request.method == "POST" else 200)

    async def _watch(self, request: web.Request, resource: Resource) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        since = request.query.get("resourceVersion", "")
        at = int(since) if since.isdecimal() else 0
        if request.query.get("sendInitialEvents") == "true" or at == 0:
            at = self._version
            for line in self._initial(request, resource):
                await response.write(line)
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            async for line in self._changes(request, resource, at):
                await response.write(line)
        return response

    def _initial(self, request: web.Request, resource: Resource) -> Iterable[bytes]:
        for (kind, _), obj in self._objects.items():
            if kind == resource and _wanted(request, obj):
                yield _line("ADDED", obj)
        if request.query.get("sendInitialEvents") == "true":
            yield self._bookmark(resource, annotations={"k8s.io/initial-events-end": "true"})

    def _bookmark(self, resource: Resource, **metadata: Any) -> bytes:
        meta = {"resourceVersion": str(self._version), **metadata}
        return _line("BOOKMARK", {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": meta})

    async def _changes(self, request: web.Request, resource: Resource, at: int) -> AsyncIterator[bytes]:
        while True:
            changed = self._changed
            for change in self._log:
                if change.version > at and change.resource == resource and (line := change.seen_by(request)):
                    yield line
            at = self._version
            try:
                async with asyncio.timeout(_BOOKMARK_S):
                    await changed.wait()
            except TimeoutError:
                yield self._bookmark(resource)


def _line(kind: str, obj: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": obj}).encode() + b"\n"


def _status(code: int, reason: str) -> web.Response:
    status = "Success" if code == 200 else "Failure"
    body = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": status, "reason": reason, "code": code}
    return web.json_response(body, status=code)


def _wanted(request: web.Request, obj: dict[str, Any]) -> bool:
    """By the two selectors as pickers use them: object names, and labels that equal something."""
    for pair in filter(None, request.query.get("fieldSelector", "").split(",")):
        key, _, value = pair.partition("=")
        if key == "metadata.name" and obj["metadata"]["name"] != value.lstrip("="):
            return False
    labels = obj["metadata"].get("labels", {})
    pairs = (pair.partition("=") for pair in request.query.get("labelSelector", "").split(",") if "=" in pair)
    return all(labels.get(key) == value.lstrip("=") for key, _, value in pairs)


def _addressed(parts: list[str]) -> tuple[Resource, str] | None:
    """The resource of a path, and the object's name if it has one."""
    match parts:
        case ["api", "v1", *rest]:
            group, version = "", "v1"
        case ["apis", group, version, *rest]:
            pass
        case _:
            return None
    if rest[:1] == ["namespaces"] and len(rest) > 2:
        rest = rest[2:]
    for resource in RESOURCES:
        if rest and (resource.group, resource.version, resource.plural) == (group, version, rest[0]):
            return resource, rest[1] if len(rest) > 1 else ""
    return None


def _discovery(parts: list[str]) -> dict[str, Any] | None:
    """Requests about the API itself."""
    groups = dict.fromkeys((one.group, one.version) for one in RESOURCES if one.group)
    match parts:
        case ["version"]:
            return {"major": "1", "minor": "35", "gitVersion": "v1.35.4", "platform": "linux/amd64"}
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"]}
        case ["apis"]:
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(*group) for group in groups]}
        case ["api", "v1"]:
            return _resources("", "v1")
        case ["apis", group, version] if (group, version) in groups:
            return _resources(group, version)
        case ["apis", name]:
            return next((_group(*group) for group in groups if group[0] == name), None)
    return None


def _group(group: str, version: str) -> dict[str, Any]:
    one = {"groupVersion": f"{group}/{version}", "version": version}
    return {"kind": "APIGroup", "apiVersion": "v1", "name": group, "versions": [one], "preferredVersion": one}


def _resources(group: str, version: str) -> dict[str, Any]:
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    found = [
        {"name": one.plural, "singularName": one.kind.lower(), "namespaced": True, "kind": one.kind, "verbs": verbs}
        for one in RESOURCES
        if (one.group, one.version) == (group, version)
    ]
    spelled = f"{group}/{version}" if group else version
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": spelled, "resources": found}
