"""Keeps the store equal to the cluster: a reflector for each kind of child, kopf and an audit for our own kinds.

A reflector knows by itself what was deleted unseen and whether its watch lives. kopf tells its handlers neither, nor
when a list has ended. So the names and versions of our own kinds are listed every minute, and at the start:

- what the store has and the list has not was deleted unseen, and is dropped;
- the kind is *synced* and *fresh* when the store has all that the list names. Where kopf does not report
  something for some seconds, it is restarted.

What cannot be read: an absent kind is empty, but for our own, without which nothing is judged: they are waited for, and
what is known of them stays. Of several namespaces one in which nothing may be read any more is *closed*: it, or its
Role, was deleted. It is forgotten, and the others are looked after.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from treeline_kube.connection import JSON, Connection
from treeline_kube.driver import Driver
from treeline_kube.errors import Forbidden, NotFound
from treeline_kube.reflector import Reflector
from treeline_kube.reflector import Timing as ReflectorTiming
from treeline_kube.resources import Collection, Ref

from treeline_operator.controller.handlers import Deliver, follow
from treeline_operator.controller.kinds import EVERY, KINDS, OPTIONAL, OWN, Watched
from treeline_operator.controller.sinks import AuditSink, Meta, StoreSink
from treeline_operator.controller.store import Store

log = logging.getLogger(__name__)

_METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_PAGE = 250
_ADVICE = {
    "not_found": "the API server does not serve it; is the CRD installed?",
    "forbidden": "see the operator's role",
}


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds.

    A watch ends every `watch_s` and is dead when it is silent for `silence_s`, so that what a dead one has missed is
    known within a minute. Kopf is restarted when it has not reported for `grace_s` what an audit has found.
    """

    watch_s: float = 45.0
    silence_s: float = 55.0
    audit_s: float = 60.0
    grace_s: float = 15.0
    absent_s: float = 30.0
    backoff_s: tuple[float, float] = (0.25, 20.0)


Source = Callable[[Sequence[Watched], Sequence[str], Any, Deliver], Coroutine[Any, Any, None]]
"""What `handlers.follow` is: kinds, namespaces, the client's configuration, and whom to tell."""


class Target(NamedTuple):
    """A kind in one namespace; an empty one means all."""

    watched: Watched
    namespace: str


@dataclass(slots=True)
class _Followed:
    """A target with its reflector. `fresh` is when it was last known to be as the API server has it, or excused;
    `listed`, whether it was, and may be read since."""

    reflector: Reflector
    driver: Driver
    fresh: float
    synced: asyncio.Event = field(default_factory=asyncio.Event)
    listed: bool = False
    unreadable: bool = False
    behind: str = ""
    check: asyncio.Task[None] | None = None


@dataclass(slots=True)
class Informer:
    """All kinds. `offered` is called with the optional ones that can be read, whenever that changes."""

    client: Connection
    store: Store
    namespaces: Sequence[str] = ("",)
    timing: Timing = field(default_factory=Timing)
    source: Source = follow
    offered: Callable[[frozenset[str]], None] = lambda _: None
    _followed: dict[Target, _Followed] = field(default_factory=dict)
    _kopf: asyncio.Task[None] | None = None
    _restart: asyncio.Event = field(default_factory=asyncio.Event)
    _delivered: asyncio.Event = field(default_factory=asyncio.Event)
    _trouble: str = ""
    _apis: frozenset[str] = frozenset()

    def start(self) -> None:
        """Begin to watch."""
        for target in (Target(watched, namespace) for watched in EVERY for namespace in self.namespaces):
            followed = self._followed[target] = self._follow(target)
            followed.driver.start()
        self._kopf = asyncio.create_task(self._run_kopf(), name="kopf")

    async def synced(self) -> None:
        """Returns when the store has all that there was at the start."""
        for followed in list(self._followed.values()):
            await followed.synced.wait()

    async def watch(self) -> None:
        """Never returns; raises what ended the task that runs kopf, which is a defect."""
        assert self._kopf is not None
        await self._kopf

    def ages(self) -> dict[str, float]:
        """Per kind the seconds since it was last known to be as the API server has it."""
        ages: dict[str, float] = {}
        now = _now()
        for target, followed in self._followed.items():
            age, heard = now - followed.fresh, followed.reflector.health(now).age_s
            if heard is not None and target.watched not in OWN:
                age = min(age, heard)
            ages[target.watched.api] = max(ages.get(target.watched.api, 0.0), age)
        return ages

    def troubles(self) -> list[str]:
        """What cannot be read at the moment, and why."""
        told = [
            (followed.reflector.collection.path, followed.reflector.advised() or followed.behind)
            for target, followed in self._followed.items()
            if not (target.watched in OPTIONAL and followed.unreadable)
        ]
        return [*(f"{path}: {trouble}" for path, trouble in told if trouble), *filter(None, [self._trouble])]

    async def stop(self) -> None:
        """End all watches."""
        tasks = [followed.check for followed in self._followed.values() if followed.check is not None]
        tasks += [self._kopf] if self._kopf is not None else []
        for task in tasks:
            task.cancel()
        stopping = (followed.driver.stop() for followed in self._followed.values())
        await asyncio.gather(*tasks, *stopping, return_exceptions=True)
        self._followed.clear()

    # ---- reflectors -----------------------------------------------------------------------------------------

    def _follow(self, target: Target) -> _Followed:
        watched, timing = target.watched, self.timing
        collection = Collection(watched.resource, target.namespace, watched.selector)
        own = watched in OWN
        sink = (AuditSink if own else StoreSink)(self.store, collection, partial(self._listed, target))
        reflector = Reflector(
            collection,
            sink,
            timing=ReflectorTiming(
                watch_s=timing.watch_s,
                silence_s=timing.silence_s,
                absent_s=timing.absent_s,
                backoff_s=timing.backoff_s,
                poll_s=timing.audit_s if own else None,
            ),
            optional=watched in OPTIONAL,
            page=_PAGE,
            accept=_METADATA if own else JSON,
            advice=_ADVICE,
        )
        driver = Driver(self.client, reflector, lambda: self._judge(target), _now)
        return _Followed(reflector, driver, _now())

    def _listed(self, target: Target, named: dict[Ref, Meta]) -> None:
        followed = self._followed[target]
        if target.watched not in OWN:
            followed.synced.set()
            self._note_listed(target, True)
        elif followed.check is None or followed.check.done():
            followed.check = asyncio.create_task(self._check(followed, named), name=f"check {target.watched.api}")

    def _judge(self, target: Target) -> None:
        """A reflector has heard something, or failed: what follows from a kind that cannot be read."""
        followed = self._followed.get(target)
        if followed is None:
            return
        reflector = followed.reflector
        if reflector.unavailable != followed.unreadable:
            closed = self._closed()
            followed.unreadable = reflector.unavailable
            if target.watched in OWN or self._closed() != closed:
                self._restart.set()
                self._tell_apis()
        error = reflector.error if reflector.unavailable else None
        if isinstance(error, NotFound):
            followed.fresh = _now()  # a new process would help nothing
            if target.watched not in OWN:
                self._forget(target)
        elif isinstance(error, Forbidden) and target.watched in OPTIONAL:
            followed.fresh = _now()
            followed.synced.set()
        elif isinstance(error, Forbidden) and target.namespace in self._closed():
            for other in self._followed:
                if other.namespace == target.namespace:
                    self._forget(other)
        if reflector.unavailable:
            self._note_listed(target, False)

    def _note_listed(self, target: Target, listed: bool) -> None:
        followed = self._followed[target]
        if followed.listed != listed:
            followed.listed = listed
            if target.watched in OPTIONAL:
                self._tell_apis()

    def _tell_apis(self) -> None:
        """An optional kind is offered where it can be read in every namespace: nothing is built on it before."""
        readable, closed = dict.fromkeys(OPTIONAL, True), self._closed()
        for target, followed in self._followed.items():
            if target.watched in readable and target.namespace not in closed:
                readable[target.watched] &= followed.listed
        apis = frozenset(watched.api for watched, may in readable.items() if may)
        if apis != self._apis:
            self._apis = apis
            self.offered(apis)

    def _forget(self, target: Target) -> None:
        resource = target.watched.resource
        self.store.retain(resource.api_version, resource.kind, target.namespace, set(), "")
        self._followed[target].fresh = _now()
        self._followed[target].synced.set()

    def _closed(self) -> set[str]:
        """The namespaces in which nothing may be read; none where that is all of them."""
        closed = set(self.namespaces)
        for target, followed in self._followed.items():
            if target.watched in KINDS and not followed.unreadable:
                closed.discard(target.namespace)
        return closed if closed != set(self.namespaces) else set()

    # ---- our own kinds --------------------------------------------------------------------------------------

    async def _run_kopf(self) -> None:
        """Runs kopf for those kinds that there are; again when these change, when it falls behind, when it fails."""
        failures = 0
        while True:
            self._restart.clear()
            kinds = [w for w in OWN if any(t.watched == w and not f.unreadable for t, f in self._followed.items())]
            closed = self._closed()
            open_ = [namespace for namespace in self.namespaces if namespace not in closed]
            begun = _now()
            running = asyncio.create_task(
                self.source(kinds, open_, self.client.configuration, self._deliver) if kinds else asyncio.sleep(3600)
            )
            restart = asyncio.create_task(self._restart.wait())
            try:
                await asyncio.wait((running, restart), return_when=asyncio.FIRST_COMPLETED)
                if not running.done():
                    log.info(
                        "kopf is started anew for %s",
                        ", ".join(watched.api for watched in kinds) or "nothing",
                    )
                    continue
                if kinds:
                    self._trouble = f"kopf ended: {running.exception()!r}"
                    log.warning(self._trouble)
            finally:
                for task in (running, restart):
                    task.cancel()
                await asyncio.gather(running, restart, return_exceptions=True)
            base, cap = self.timing.backoff_s
            failures = failures + 1 if _now() - begun < 2 * cap else 1
            await asyncio.sleep(min(cap, base * 2.0 ** min(failures, 20)) * random.uniform(0.5, 1.0))

    def _deliver(self, watched: Watched, type_: str | None, obj: dict[str, Any]) -> None:
        resource = watched.resource
        obj.setdefault("apiVersion", resource.api_version)
        obj.setdefault("kind", resource.kind)
        meta = obj["metadata"]
        if type_ == "DELETED":
            ref = Ref(resource.api_version, resource.kind, meta.get("namespace", ""), meta["name"])
            self.store.remove(ref, meta["uid"], meta["resourceVersion"])
        else:
            self.store.put(obj)
        self._trouble = ""
        self._delivered.set()

    async def _check(self, followed: _Followed, named: dict[Ref, Meta]) -> None:
        """Returns when kopf has reported all that a list named, or none of it for the length of the grace."""
        while named := {ref: meta for ref, meta in named.items() if not self._is_told(ref, meta)}:
            left = len(named)
            try:
                async with asyncio.timeout(self.timing.grace_s):
                    while sum(not self._is_told(ref, meta) for ref, meta in named.items()) == left:
                        self._delivered.clear()
                        await self._delivered.wait()
                        await asyncio.sleep(0.05)  # many come together
            except TimeoutError:
                break
        if named:
            followed.behind = f"{len(named)} objects are newer than what kopf told, {next(iter(named)).name} for one"
            log.warning("%s: %s", followed.reflector.collection.path, followed.behind)
            self._restart.set()
            return
        followed.behind = ""
        followed.fresh = _now()
        followed.synced.set()

    def _is_told(self, ref: Ref, meta: Meta) -> bool:
        return self.store.has_seen(ref, meta.uid, meta.resourceVersion)


def _now() -> float:
    return asyncio.get_running_loop().time()
