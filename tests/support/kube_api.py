"""A fake Kubernetes API server: collections with versions, paged lists, watches with bookmarks, and every way to fail.

`Collection` is pure; `FakeApi` puts collections behind HTTP. Objects are plain JSON data; versions count up.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from aiohttp import web


class TooOld(Exception):
    """The requested version is too old."""


class Collection:
    """Objects of one kind by name. `log` holds the events since `floor`."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.version = 1
        self.floor = 1
        self.log: list[tuple[int, str, dict[str, Any]]] = []
        self._snapshots: dict[int, list[dict[str, Any]]] = {}

    def put(self, obj: dict[str, Any]) -> None:
        """Create or replace."""
        name = obj["metadata"]["name"]
        kind = "MODIFIED" if name in self.objects else "ADDED"
        self.version += 1
        stored = {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(self.version)}}
        self.objects[name] = stored
        self.log.append((self.version, kind, stored))

    def delete(self, name: str) -> None:
        """Delete, if it exists."""
        if name in self.objects:
            self.version += 1
            gone = self.objects.pop(name)
            last = {**gone, "metadata": {**gone["metadata"], "resourceVersion": str(self.version)}}
            self.log.append((self.version, "DELETED", last))

    def compact(self) -> None:
        """Forget all events: watches from older versions get 410."""
        self.floor = self.version
        self.log.clear()

    def page(self, query: dict[str, str]) -> bytes:
        """Return a list, or a page of one. Raises TooOld for a continue token that was compacted."""
        start, at = 0, self.version
        if token := query.get("continue"):
            start, at = (int(word) for word in token.split("@"))
            if at < self.floor:
                raise TooOld
        seen = self._snapshots.setdefault(at, [self.objects[name] for name in sorted(self.objects)])
        limit = int(query.get("limit", 0)) or len(seen) + 1
        more = f"{start + limit}@{at}" if start + limit < len(seen) else ""
        meta = {"resourceVersion": str(at), "continue": more}
        return json.dumps({"metadata": meta, "items": seen[start : start + limit]}).encode()

    def since(self, version: int) -> list[bytes]:
        """Return the events after a version, as lines. Raises TooOld."""
        if version < self.floor:
            raise TooOld
        return [line(kind, obj) for at, kind, obj in self.log if at > version]

    def bookmark(self) -> bytes:
        """Return a line with the version that the watch has reached."""
        return line("BOOKMARK", {"metadata": {"resourceVersion": str(self.version)}})


def line(kind: str, obj: dict[str, Any]) -> bytes:
    """Return one event of a watch."""
    return json.dumps({"type": kind, "object": obj}).encode() + b"\n"


def expired() -> bytes:
    """Return the event that ends a watch whose version is too old."""
    return line("ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"})


class FakeApi:
    """Serves collections by path. Each fault lasts until the test changes it. `refuse` maps a path to a status;
    `refuse_watch` the same for watches only. `stall` makes watches silent."""

    def __init__(self) -> None:
        self.collections: dict[str, Collection] = {}
        self.refuse: dict[str, int] = {}
        self.refuse_watch: dict[str, int] = {}
        self.retry_after: str | None = None
        self.stall = False
        self.lists: Counter[str] = Counter()
        self.watches: Counter[str] = Counter()
        self.open: Counter[str] = Counter()
        self.tokens: list[str] = []
        self.token: str | None = None
        self.port = 0
        self._changed = asyncio.Event()
        self._drop = asyncio.Event()
        self._runner: web.AppRunner | None = None

    def collection(self, path: str) -> Collection:
        """Return the collection at a path, made on first use."""
        return self.collections.setdefault(path, Collection())

    def change(self, path: str, do: Callable[[Collection], None]) -> None:
        """Change a collection and notify the watches."""
        do(self.collection(path))
        self._changed.set()
        self._changed = asyncio.Event()

    def drop(self) -> None:
        """Cut all watches."""
        self._drop.set()
        self._drop = asyncio.Event()

    async def start(self) -> None:
        """Listen, on the old port if there was one."""
        app = web.Application()
        app.router.add_get("/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stop listening; the state stays for the next start."""
        self.drop()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def kubeconfig(self, folder: Path) -> Path:
        """Write a kubeconfig for this server; with `token` it has that one."""
        user = {} if self.token is None else {"token": self.token}
        config = {
            "current-context": "fake",
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake"}}],
            "clusters": [{"name": "fake", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "users": [{"name": "fake", "user": user}],
        }
        path = folder / "kubeconfig"
        path.write_text(json.dumps(config))
        return path

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        path, query = request.path, dict(request.query)
        watch = query.get("watch") == "true"
        (self.watches if watch else self.lists)[path] += 1
        if self.token is not None and request.headers.get("authorization") != f"Bearer {self.token}":
            return self._status(401)
        status = self.refuse.get(path) or (self.refuse_watch.get(path) if watch else None)
        if status is not None:
            return self._status(status)
        if path not in self.collections:
            return self._status(404)
        try:
            if watch:
                return await self._watch(request, path, int(query["resourceVersion"]))
            return web.Response(body=self.collections[path].page(query), content_type="application/json")
        except TooOld:
            return self._status(410)

    async def _watch(self, request: web.Request, path: str, version: int) -> web.StreamResponse:
        collection = self.collections[path]
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        self.open[path] += 1
        try:
            while True:
                changed, dropped = self._changed, self._drop
                if not self.stall:
                    try:
                        lines = collection.since(version)
                    except TooOld:
                        await response.write(expired())
                        return response
                    for data in lines:
                        await response.write(data)
                    version = max(version, collection.version)
                waits = [asyncio.create_task(event.wait()) for event in (changed, dropped)]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for wait in waits:
                    wait.cancel()
                if dropped.is_set():
                    if request.transport is not None:
                        request.transport.abort()
                    return response
        finally:
            self.open[path] -= 1

    def _status(self, code: int) -> web.Response:
        headers = {} if self.retry_after is None else {"retry-after": self.retry_after}
        body = {"kind": "Status", "code": code, "message": f"the fake server says {code}"}
        return web.json_response(body, status=code, headers=headers)


@contextlib.asynccontextmanager
async def fake_api() -> AsyncIterator[FakeApi]:
    """Run a fake API server."""
    api = FakeApi()
    await api.start()
    try:
        yield api
    finally:
        await api.stop()


def pod(
    name: str,
    *,
    ip: str | None = "10.0.0.1",
    ready: bool = True,
    labels: dict[str, str] | None = None,
    uid: str = "",
    restarts: int = 0,
    **metadata: Any,
) -> dict[str, Any]:
    """Return a pod as the API shows it."""
    status: dict[str, Any] = {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        "containerStatuses": [{"name": "runtime", "restartCount": restarts}],
    }
    if ip is not None:
        status["podIP"] = ip
    return {
        "metadata": {
            "name": name,
            "uid": uid or f"uid-{name}",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {"treeline.dev/pool": "a"} if labels is None else labels,
            **metadata,
        },
        "spec": {"containers": [{"name": "runtime", "image": "x"}]},
        "status": status,
    }


def own_pool(name: str, *, gateway: str = "treeline", port: int = 8000, model: str | None = None) -> dict[str, Any]:
    """Return an InferencePool of ours."""
    return {
        "apiVersion": "treeline.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": name, "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {
            "model": {"uri": "builtin://tiny", **({"name": model} if model else {})},
            "engine": {"port": port},
            "gateway": {"name": gateway},
        },
    }


def own_model(name: str, pool: str, *, model: str | None = None, **spec: Any) -> dict[str, Any]:
    """Return an InferenceModel of ours."""
    return {
        "apiVersion": "treeline.dev/v1alpha1",
        "kind": "InferenceModel",
        "metadata": {"name": name, "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"modelName": model or name, "poolRef": {"name": pool}, **spec},
    }


PODS = "/api/v1/namespaces/{}/pods"
POOLS = "/apis/treeline.dev/v1alpha1/namespaces/{}/inferencepools"
MODELS = "/apis/treeline.dev/v1alpha1/namespaces/{}/inferencemodels"


def crd(group: str, version: str, kind: str, plural: str) -> dict[str, Any]:
    """Return a CustomResourceDefinition that accepts any spec and status."""
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    schema = {"type": "object", "properties": {"spec": anything, "status": anything}}
    metadata = {
        "name": f"{plural}.{group}",
        "annotations": {"api-approved.kubernetes.io": "unapproved, for tests"},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": metadata,
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"},
            "versions": [{"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}],
        },
    }
