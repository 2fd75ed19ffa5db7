"""Keeps the store equal to the cluster, by a reflector for each kind.

A reflector knows by itself what was deleted unseen (after a list it drops what the list does not name) and whether its
watch lives. kopf (1.45.2, `_cogs/clients/watching.py`) tells neither handlers nor indices what has gone
when it lists anew after 410 Gone, and a 410 as the answer to a watch ends it.

What cannot be read: an absent kind is empty, but for our own, without which nothing is judged: they are waited for, and
what is known of them stays. Of several namespaces one in which nothing may be read any more is *closed*: it, or its
Role, was deleted. It is forgotten, and the others are looked after.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from treeline_kube.connection import Connection
from treeline_kube.driver import Driver
from treeline_kube.errors import Forbidden, NotFound
from treeline_kube.reflector import Reflector
from treeline_kube.reflector import Timing as ReflectorTiming
from treeline_kube.resources import Collection, Ref

from treeline_operator.controller.kinds import KINDS, OPTIONAL, OWN, Watched
from treeline_operator.controller.store import Store

_PAGE = 250
_ADVICE = {
    "not_found": "the API server does not serve it; is the CRD installed?",
    "forbidden": "see the operator's role",
}


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds.

    A watch ends every `watch_s` and is dead when it is silent for `silence_s`, so that what a dead one has missed is
    known within a minute.
    """

    watch_s: float = 45.0
    silence_s: float = 55.0
    absent_s: float = 30.0
    backoff_s: tuple[float, float] = (0.25, 20.0)
    patience_s: float = 5.0


class _Meta(msgspec.Struct):
    name: str
    uid: str
    namespace: str = ""
    resourceVersion: str = ""


class _Item(msgspec.Struct):
    metadata: _Meta


_item = msgspec.json.Decoder(_Item).decode
_decode: Callable[[msgspec.Raw], dict[str, Any]] = msgspec.json.decode


class StoreSink:
    """Keeps the objects of a collection in the store. `on_list` is called when a list has ended."""

    def __init__(self, store: Store, collection: Collection, on_list: Callable[[], None]) -> None:
        self._store = store
        self._resource, self._namespace, _ = collection
        self._on_list = on_list
        self._uids: set[str] = set()

    def begin(self) -> None:
        """A list begins."""
        self._uids = set()

    def listed(self, data: msgspec.Raw) -> None:
        """The list names this object."""
        self._uids.add(_item(data).metadata.uid)
        self.changed(data)

    def complete(self, version: str) -> bool:
        """The list has ended: what it did not name is gone."""
        resource = self._resource
        gone = self._store.retain(resource.api_version, resource.kind, self._namespace, self._uids, version)
        self._on_list()
        return gone > 0

    def changed(self, data: msgspec.Raw) -> bool:
        """An object came or changed."""
        # items of a list do not say what they are
        kind = {"apiVersion": self._resource.api_version, "kind": self._resource.kind}
        return self._store.put({**kind, **_decode(data)})

    def deleted(self, data: msgspec.Raw) -> bool:
        """An object went."""
        meta, resource = _item(data).metadata, self._resource
        ref = Ref(resource.api_version, resource.kind, meta.namespace, meta.name)
        return self._store.remove(ref, meta.uid, meta.resourceVersion)


class Target(NamedTuple):
    """A kind in one namespace; an empty one means all."""

    watched: Watched
    namespace: str


@dataclass(slots=True)
class _Followed:
    """A target with its reflector. `fresh` is when it was last known to be as the API server has it, or excused."""

    reflector: Reflector
    driver: Driver
    fresh: float
    synced: asyncio.Event = field(default_factory=asyncio.Event)
    unreadable: bool = False


@dataclass(slots=True)
class Informer:
    """All kinds. Optional ones come and go with `set_optional`."""

    client: Connection
    store: Store
    namespaces: Sequence[str] = ("",)
    timing: Timing = field(default_factory=Timing)
    _followed: dict[Target, _Followed] = field(default_factory=dict)

    def start(self) -> None:
        """Begin to watch the kinds that are always there."""
        self._begin(KINDS)

    async def set_optional(self, apis: Iterable[str]) -> frozenset[str]:
        """Watch exactly those optional kinds that are among `apis`.

        Returns `apis` without what cannot be read, be it that it may not: nothing is to be built on it.
        """
        offered = frozenset(apis)
        wanted = {watched for watched in OPTIONAL if watched.api in offered}
        for target in [t for t in self._followed if t.watched in OPTIONAL and t.watched not in wanted]:
            await self._followed.pop(target).driver.stop()
            self._forget_objects(target)
        self._begin(wanted)
        new = {target: followed for target, followed in self._followed.items() if target.watched in wanted}
        waiting = [asyncio.create_task(followed.synced.wait()) for followed in new.values()]
        if waiting:
            await asyncio.wait(waiting, timeout=self.timing.patience_s)
            for task in waiting:
                task.cancel()
        return offered - {
            t.watched.api
            for t, followed in new.items()
            if (followed.unreadable or not followed.synced.is_set()) and not self._closed(t.namespace)
        }

    async def synced(self) -> None:
        """Returns when the store has all that there was at the start."""
        for followed in list(self._followed.values()):
            await followed.synced.wait()

    def ages(self) -> dict[str, float]:
        """Per kind the seconds since it was last known to be as the API server has it."""
        ages: dict[str, float] = {}
        now = _now()
        for target, followed in self._followed.items():
            age, heard = now - followed.fresh, followed.reflector.health(now).age_s
            if heard is not None:
                age = min(age, heard)
            ages[target.watched.api] = max(ages.get(target.watched.api, 0.0), age)
        return ages

    def troubles(self) -> list[str]:
        """What cannot be read at the moment, and why."""
        reflectors = [followed.reflector for followed in self._followed.values()]
        return [f"{one.collection.path}: {trouble}" for one in reflectors if (trouble := one.advised())]

    async def stop(self) -> None:
        """End all watches."""
        stopping = (followed.driver.stop() for followed in self._followed.values())
        await asyncio.gather(*stopping, return_exceptions=True)
        self._followed.clear()

    def _begin(self, kinds: Iterable[Watched]) -> None:
        for target in (Target(watched, namespace) for watched in kinds for namespace in self.namespaces):
            if target not in self._followed:
                followed = self._followed[target] = self._follow(target)
                followed.driver.start()

    def _follow(self, target: Target) -> _Followed:
        watched, timing = target.watched, self.timing
        collection = Collection(watched.resource, target.namespace, watched.selector)
        sink = StoreSink(self.store, collection, lambda: self._followed[target].synced.set())
        reflector = Reflector(
            collection,
            sink,
            timing=ReflectorTiming(
                watch_s=timing.watch_s,
                silence_s=timing.silence_s,
                absent_s=timing.absent_s,
                backoff_s=timing.backoff_s,
            ),
            optional=watched in OPTIONAL,
            page=_PAGE,
            advice=_ADVICE,
        )
        driver = Driver(self.client, reflector, lambda: self._judge(target), _now)
        return _Followed(reflector, driver, _now())

    def _judge(self, target: Target) -> None:
        """A reflector has heard something, or failed: what follows from a kind that cannot be read."""
        followed = self._followed.get(target)
        if followed is None:
            return
        reflector = followed.reflector
        followed.unreadable = reflector.unavailable
        error = reflector.error if reflector.unavailable else None
        if isinstance(error, NotFound):
            followed.fresh = _now()  # a new process would help nothing
            if target.watched not in OWN:
                self._forget(target)
        elif isinstance(error, Forbidden) and target.watched in OPTIONAL:
            followed.fresh = _now()
        elif isinstance(error, Forbidden) and self._closed(target.namespace):
            for other in self._followed:
                if other.namespace == target.namespace:
                    self._forget(other)

    def _forget(self, target: Target) -> None:
        self._forget_objects(target)
        self._followed[target].fresh = _now()
        self._followed[target].synced.set()

    def _forget_objects(self, target: Target) -> None:
        resource = target.watched.resource
        self.store.retain(resource.api_version, resource.kind, target.namespace, set(), "")

    def _closed(self, namespace: str) -> bool:
        """Whether nothing may be read in this namespace, and something in another."""
        unreadable = dict.fromkeys(self.namespaces, True)
        for target, followed in self._followed.items():
            if target.watched in KINDS:
                unreadable[target.namespace] &= followed.unreadable
        return unreadable[namespace] and not all(unreadable.values())


def _now() -> float:
    return asyncio.get_running_loop().time()
