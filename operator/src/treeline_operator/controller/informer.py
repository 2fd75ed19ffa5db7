"""Keeps the store equal to the cluster: a reflector for each kind, and kopf for events of our own kinds.

Reflectors of children watch, so they detect missed deletions and dead watches. kopf watches pools and models but
reports neither, so their reflectors list them every minute. Both write into the store, where newer versions win: kopf
reports at once what a list would show within a minute.

Unreadable kinds: an absent kind counts as empty, except our own, which are awaited and keep their known objects. A kind
that was readable is given up at the second refusal in a row, because an API server that has just started may refuse
once. Of several namespaces, one in which nothing may be read any more is *closed* (it, or its Role, was deleted): it is
forgotten, and the others continue.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from treeline_kube.connection import Connection
from treeline_kube.driver import Driver
from treeline_kube.errors import Forbidden, NotFound
from treeline_kube.reflector import Reflector
from treeline_kube.reflector import Timing as ReflectorTiming
from treeline_kube.resources import Collection, Ref, Resource

from treeline_operator.controller.handlers import Deliver, follow
from treeline_operator.controller.kinds import EVERY, OPTIONAL, OWN
from treeline_operator.controller.store import Store

log = logging.getLogger(__name__)

_PAGE = 250
_ADVICE = {
    "not_found": "the API server does not have it; install the CRD",
    "forbidden": "check the operator's role",
}
_OWN = frozenset(kind.resource for kind in OWN)
_OPTIONAL = frozenset(kind.resource for kind in OPTIONAL)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds.

    A watch ends every `watch_s` and is dead when it is silent for `silence_s`, so that what a dead one has missed is
    known within a minute. Our own kinds are listed every `list_s`.
    """

    watch_s: float = 45.0
    silence_s: float = 55.0
    list_s: float = 60.0
    absent_s: float = 30.0
    backoff_s: tuple[float, float] = (0.25, 20.0)


Source = Callable[[Sequence[Resource], Sequence[str], Any, Deliver], Coroutine[Any, Any, None]]
"""The signature of `handlers.follow`: kinds, namespaces, the client's configuration, and the receiver."""


class _Meta(msgspec.Struct):
    name: str
    uid: str
    namespace: str = ""
    resourceVersion: str = ""


class _Item(msgspec.Struct):
    metadata: _Meta


_item = msgspec.json.Decoder(_Item).decode
_object = msgspec.json.Decoder(dict[str, Any]).decode


@dataclass(slots=True)
class StoreSink:
    """Keeps the objects of a collection in the store. `on_list` is called when a list has ended."""

    store: Store
    collection: Collection
    on_list: Callable[[], None]
    _uids: set[str] = field(default_factory=set)

    def begin(self) -> None:
        """A list begins."""
        self._uids = set()

    def listed(self, data: msgspec.Raw) -> None:
        """The list names this object."""
        self._uids.add(_item(data).metadata.uid)
        self.changed(data)

    def complete(self, version: str) -> bool:
        """The list has ended."""
        resource = self.collection.resource
        gone = self.store.retain(resource.api_version, resource.kind, self.collection.namespace, self._uids, version)
        self.on_list()
        return gone > 0

    def changed(self, data: msgspec.Raw) -> bool:
        """An object came or changed."""
        return self.store.put(_named(self.collection.resource, _object(data)))

    def deleted(self, data: msgspec.Raw) -> bool:
        """An object was deleted."""
        meta, resource = _item(data).metadata, self.collection.resource
        ref = Ref(resource.api_version, resource.kind, meta.namespace, meta.name)
        return self.store.remove(ref, meta.uid, meta.resourceVersion)


@dataclass(slots=True)
class _Followed:
    """A kind in one namespace, or in all, and its reflector.

    `fresh` is when it was last excused from being current; `refusals` counts all refusals, `tolerated` those before it
    was last followed. `forbidden` is the text of the last refusal, which stays until the API server answers otherwise.
    """

    collection: Collection
    reflector: Reflector
    driver: Driver
    fresh: float
    synced: asyncio.Event = field(default_factory=asyncio.Event)
    refused: bool = False
    forbidden: bool = False
    refusals: int = 0
    tolerated: int = 0

    @property
    def own(self) -> bool:
        return self.collection.resource in _OWN

    @property
    def optional(self) -> bool:
        return self.collection.resource in _OPTIONAL

    @property
    def readable(self) -> bool:
        return self.reflector.synced and not self.refused

    def judge(self) -> bool:
        """Find out whether it is refused: more than once where it was read before. Whether it was refused just now."""
        reflector = self.reflector
        refusals = reflector.errors["forbidden"] + reflector.errors["not_found"]
        again, self.refusals = refusals > self.refusals, refusals
        if again:
            self.forbidden = isinstance(reflector.error, Forbidden)
        if reflector.error is None:
            self.tolerated, self.refused = refusals, False
        else:
            self.refused = refusals - self.tolerated > self.readable
        return again and self.refused


@dataclass(slots=True)
class Informer:
    """Follows all kinds. `offered` is called with the optional kinds that can be read, and with the existing ones that
    may not be read, whenever these change."""

    client: Connection
    store: Store
    namespaces: Sequence[str] = ("",)
    timing: Timing = field(default_factory=Timing)
    source: Source = follow
    offered: Callable[[frozenset[str], frozenset[str]], None] = lambda *_: None
    _followed: list[_Followed] = field(default_factory=list)
    _kopf: asyncio.Task[None] | None = None
    _restart: asyncio.Event = field(default_factory=asyncio.Event)
    _apis: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())

    def start(self) -> None:
        """Begin to watch."""
        self._followed = [self._follow(kind._replace(namespace=space)) for kind in EVERY for space in self.namespaces]
        for followed in self._followed:
            followed.driver.start()
        self._kopf = asyncio.create_task(self._run_kopf(), name="kopf")

    async def synced(self) -> None:
        """Returns when the store has all objects that existed at the start."""
        for followed in self._followed:
            await followed.synced.wait()

    async def watch(self) -> None:
        """Never returns; raises what ended the task that runs kopf, which is a defect."""
        assert self._kopf is not None
        await self._kopf

    def ages(self) -> dict[str, float]:
        """Per kind the seconds since it was last known to be as the API server has it."""
        ages: dict[str, float] = {}
        now = _now()
        for followed in self._followed:
            api, heard = followed.collection.resource.api, followed.reflector.health(now).age_s
            age = now - followed.fresh
            ages[api] = max(ages.get(api, 0.0), age if heard is None else min(age, heard))
        return ages

    def troubles(self) -> list[str]:
        """The kinds that cannot be read now, and why."""
        told = (f for f in self._followed if not (f.optional and f.refused))
        return [f"{f.collection.path}: {trouble}" for f in told if (trouble := f.reflector.advised())]

    async def stop(self) -> None:
        """End all watches."""
        if self._kopf is not None:
            self._kopf.cancel()
            await asyncio.gather(self._kopf, return_exceptions=True)
        await asyncio.gather(*(followed.driver.stop() for followed in self._followed), return_exceptions=True)
        self._followed.clear()

    def _follow(self, collection: Collection) -> _Followed:
        timing = self.timing
        reflector = Reflector(
            collection,
            StoreSink(self.store, collection, lambda: self._listed(followed)),
            timing=ReflectorTiming(
                watch_s=timing.watch_s,
                silence_s=timing.silence_s,
                absent_s=timing.absent_s,
                backoff_s=timing.backoff_s,
                poll_s=timing.list_s if collection.resource in _OWN else None,
            ),
            optional=collection.resource in _OPTIONAL,
            page=_PAGE,
            advice=_ADVICE,
        )
        driver = Driver(self.client, reflector, lambda: self._judge(followed), _now)
        followed = _Followed(collection, reflector, driver, _now())
        return followed

    def _listed(self, followed: _Followed) -> None:
        followed.synced.set()
        self._tell_apis()

    def _judge(self, followed: _Followed) -> None:
        """A reflector has heard something, or failed: what follows from a kind that cannot be read."""
        before, closed = followed.refused, self._closed()
        again = followed.judge()
        if followed.refused != before:
            if followed.own or self._closed() != closed:
                self._restart.set()
            self._tell_apis()
        if not again:
            return
        error = followed.reflector.error
        if isinstance(error, NotFound):
            followed.fresh = _now()  # a new process would help nothing
            if not followed.own:
                self._forget(followed)
        elif isinstance(error, Forbidden) and followed.optional:
            followed.fresh = _now()
            followed.synced.set()
        elif isinstance(error, Forbidden) and followed.collection.namespace in self._closed():
            for other in self._followed:
                if other.collection.namespace == followed.collection.namespace:
                    self._forget(other)

    def _tell_apis(self) -> None:
        """An optional kind is offered where it can be read in every namespace: nothing is built on it before."""
        closed = self._closed()
        asked = [f for f in self._followed if f.optional and f.collection.namespace not in closed]
        apis = _apis(asked) - _apis(f for f in asked if not f.readable)
        forbidden = _apis(f for f in asked if f.refused and f.forbidden)
        if self._apis != (apis, forbidden):
            self._apis = apis, forbidden
            self.offered(apis, forbidden)

    def _forget(self, followed: _Followed) -> None:
        resource, namespace, _ = followed.collection
        self.store.retain(resource.api_version, resource.kind, namespace, set(), "")
        followed.fresh = _now()
        followed.synced.set()

    def _closed(self) -> set[str]:
        """The namespaces in which nothing may be read; none where that is all of them."""
        open_ = {f.collection.namespace for f in self._followed if not (f.optional or f.refused)}
        return set(self.namespaces) - open_ if open_ else set()

    async def _run_kopf(self) -> None:
        """Runs kopf for the kinds that exist; again when these change, and when it fails."""
        failures = 0
        while True:
            self._restart.clear()
            kinds = list(dict.fromkeys(f.collection.resource for f in self._followed if f.own and not f.refused))
            closed = self._closed()
            begun = _now()
            running = asyncio.create_task(
                self.source(
                    kinds, [n for n in self.namespaces if n not in closed], self.client.configuration, self._deliver
                )
                if kinds
                else asyncio.sleep(3600)
            )
            restart = asyncio.create_task(self._restart.wait())
            try:
                await asyncio.wait((running, restart), return_when=asyncio.FIRST_COMPLETED)
                if not running.done():
                    log.info("restarting kopf for %s", ", ".join(kind.api for kind in kinds) or "nothing")
                    continue
                if kinds:
                    log.warning("changes are seen within a minute, not at once: kopf ended: %r", running.exception())
            finally:
                for task in (running, restart):
                    task.cancel()
                await asyncio.gather(running, restart, return_exceptions=True)
            base, cap = self.timing.backoff_s
            failures = failures + 1 if _now() - begun < 2 * cap else 1
            await asyncio.sleep(min(cap, base * 2.0 ** min(failures, 20)) * random.uniform(0.5, 1.0))

    def _deliver(self, resource: Resource, type_: str | None, obj: dict[str, Any]) -> None:
        if type_ == "DELETED":
            meta = obj["metadata"]
            ref = Ref(resource.api_version, resource.kind, meta.get("namespace", ""), meta["name"])
            self.store.remove(ref, meta["uid"], meta["resourceVersion"])
        else:
            self.store.put(_named(resource, obj))


def _named(resource: Resource, obj: dict[str, Any]) -> dict[str, Any]:
    """Return an item of a list with its kind, which lists leave out."""
    return {"apiVersion": resource.api_version, "kind": resource.kind, **obj}


def _apis(followed: Iterable[_Followed]) -> frozenset[str]:
    return frozenset(one.collection.resource.api for one in followed)


def _now() -> float:
    return asyncio.get_running_loop().time()
