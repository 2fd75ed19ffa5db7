"""A cluster that a test simulates for an informer in virtual time: lists, watches, kopf's reports, and losses."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from treeline_kube.connection import Answer, Call
from treeline_kube.errors import Forbidden, Gone, Timeout
from treeline_kube.resources import Collection, Resource
from treeline_operator.controller.handlers import Deliver
from treeline_operator.controller.informer import Informer, Timing
from treeline_operator.controller.kinds import EVERY, KINDS, OWN
from treeline_operator.controller.store import Store

from support.virtual_loop import run

DEPLOYMENTS = next(kind for kind in KINDS if kind.resource.kind == "Deployment")
PODS = next(kind for kind in KINDS if kind.resource.kind == "Pod")


class World:
    """Objects, their lists and watches, and the runs of kopf, which reports our own kinds."""

    configuration = None

    def __init__(self) -> None:
        self.version = 100
        self.floor = 100
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.log: list[tuple[int, str, str, dict[str, Any]]] = []
        self.failing: dict[str, Exception] = {}
        self.dead: set[str] = set()
        self.unwatched: set[str] = set()
        self.ends: list[Exception] = []
        self.runs: list[list[str]] = []
        self.listed: dict[str, int] = {}
        self.asked = 0
        self.watched: dict[str, int] = {}
        self.deliver: Deliver | None = None
        self.namespaces: list[str] = []
        self.changed = asyncio.Event()

    async def request(self, call: Call) -> Answer:
        watched, namespace = self._asked(call)
        self.listed[call.path] = self.listed.get(call.path, 0) + 1
        query = dict(call.query)
        assert query.get("labelSelector", "") == watched.selector
        items = [
            obj for (api, ns, _), obj in self.objects.items() if api == watched.resource.api and namespace in ("", ns)
        ]
        first = int(query.get("continue", "0"))
        page, more = items[first : first + 2], str(first + 2) if first + 2 < len(items) else ""
        meta = {"resourceVersion": str(self.version), "continue": more}
        return Answer(200, {}, json.dumps({"metadata": meta, "items": page or None}).encode())

    @contextlib.asynccontextmanager
    async def watch(self, call: Call, silence_s: float) -> AsyncIterator[AsyncIterator[bytes]]:
        watched, namespace = self._asked(call)
        assert watched not in OWN, "kopf watches these"
        if watched.resource.plural in self.unwatched:
            raise Forbidden("403: may not be watched", code=403)
        self.watched[watched.resource.api] = self.watched.get(watched.resource.api, 0) + 1
        yield self._events(watched, namespace, dict(call.query), silence_s)

    async def _events(
        self, watched: Collection, namespace: str, query: dict[str, str], silence_s: float
    ) -> AsyncIterator[bytes]:
        since, now = int(query["resourceVersion"]), asyncio.get_running_loop().time
        ends = now() + int(query["timeoutSeconds"])
        while now() < ends:
            if watched.resource.plural in self.dead:
                await asyncio.sleep(silence_s)
                raise Timeout("silence")
            self._refuse(watched.resource.path(namespace))
            if since < self.floor:
                raise Gone("too old")
            found = [
                {"type": type_, "object": obj}
                for version, type_, api, obj in self.log
                if version > since and api == watched.resource.api and namespace in ("", obj["metadata"]["namespace"])
            ]
            since = self.version
            found.append({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(since)}}})
            yield b"".join(json.dumps(event).encode() + b"\n" for event in found)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(ends):
                    await self.changed.wait()

    async def kopf(self, kinds: Sequence[Resource], namespaces: Sequence[str], _: Any, deliver: Deliver) -> None:
        self.runs.append([resource.plural for resource in kinds])
        self.namespaces = list(namespaces)
        self.deliver = deliver
        await asyncio.sleep(0.1)
        for resource in kinds:
            for (api, namespace, _), obj in list(self.objects.items()):
                if api == resource.api and {"", namespace} & set(namespaces):
                    deliver(resource, None, json.loads(json.dumps(obj)))
        if self.ends:
            raise self.ends.pop(0)
        await asyncio.Event().wait()

    def put(self, watched: Collection, name: str, *, heard: bool = True) -> None:
        self.version += 1
        known = self.objects.get((watched.resource.api, "n", name), {"metadata": {"uid": f"u-{name}-{self.version}"}})
        meta = {"namespace": "n", "name": name, "resourceVersion": str(self.version)}
        meta["uid"] = known["metadata"]["uid"]
        self.objects[watched.resource.api, "n", name] = {"metadata": meta}
        self._tell(watched, "MODIFIED", {"metadata": dict(meta)}, heard)

    def delete(self, watched: Collection, name: str, *, heard: bool = True) -> None:
        self.version += 1
        meta = self.objects.pop((watched.resource.api, "n", name))["metadata"]
        self._tell(watched, "DELETED", {"metadata": {**meta, "resourceVersion": str(self.version)}}, heard)

    def compact(self) -> None:
        self.floor = self.version
        self.log.clear()

    def _tell(self, watched: Collection, type_: str, obj: dict[str, Any], heard: bool) -> None:
        self.log.append((self.version, type_, watched.resource.api, obj))
        self.stir()
        if watched in OWN and heard and self.deliver is not None:
            self.deliver(watched.resource, type_, json.loads(json.dumps(obj)))

    def stir(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def _asked(self, call: Call) -> tuple[Collection, str]:
        self._refuse(call.path)
        resources = {w.resource.path(ns): (w, ns) for w in EVERY for ns in ("", "n", "m")}
        return resources[call.path]

    def _refuse(self, path: str) -> None:
        self.asked += 1
        for part, exc in self.failing.items():
            if part in f"{path}/":
                raise exc


class Scene:
    """The world, the informer that follows it, and the store that the informer fills."""

    def __init__(self, world: World, store: Store, informer: Informer) -> None:
        self.world, self.store, self.informer = world, store, informer
        self.offered: list[frozenset[str]] = [frozenset()]
        self.forbidden: list[frozenset[str]] = [frozenset()]
        informer.offered = self._offered

    def _offered(self, apis: frozenset[str], forbidden: frozenset[str]) -> None:
        self.offered.append(apis)
        self.forbidden.append(forbidden)

    def names(self, watched: Collection = DEPLOYMENTS) -> list[str]:
        return [o.ref.name for o in self.store.of_kind(watched.resource.api_version, watched.resource.kind, "n")]

    def versions(self, name: str) -> set[str]:
        found = (self.store.of_kind(w.resource.api_version, w.resource.kind, "n") for w in EVERY)
        return {o.resource_version for objects in found for o in objects if o.ref.name == name}


def play(act: Callable[[Scene], Coroutine[Any, Any, None]], namespaces: Sequence[str] = ("",), **timing: Any) -> None:
    """Run a scene that begins with two Deployments and three Pods."""

    async def main() -> None:
        world, store = World(), Store()
        for name in ("a", "b"):
            world.put(DEPLOYMENTS, name)
        for name in ("p", "q", "r"):
            world.put(PODS, name)
        client: Any = world
        informer = Informer(client, store, namespaces, timing=Timing(**timing), source=world.kopf)
        try:
            await act(Scene(world, store, informer))
        finally:
            await informer.stop()

    run(main())


async def begin(scene: Scene) -> None:
    scene.informer.start()
    await scene.informer.synced()
