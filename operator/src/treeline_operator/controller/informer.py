"""Keeps the store equal to the cluster: kopf's events, and an audit of what kopf cannot tell.

kopf does not say when a list has ended, what was deleted while nobody watched, or whether a quiet watch still lives.
So each kind's names and versions are listed by themselves, at the start, whenever kopf lists anew and every minute:

- what the store has and the list has not was deleted unseen, and is dropped;
- the store is *synced* when it has all that the first lists named;
- a kind is *fresh* when an audit finds nothing that kopf has not told within a few seconds. Where that fails, kopf is
  started anew.

What cannot be read: an absent kind is empty, but for our own, without which nothing is judged: they are waited for, and
what is known of them stays. Of several namespaces one in which nothing may be read any more is *closed*: it, or its
Role, was deleted. It is forgotten, and the others are looked after.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from treeline_operator.api.parts import API_VERSION
from treeline_operator.controller.kinds import KINDS, OPTIONAL, Watched
from treeline_operator.controller.store import Store
from treeline_operator.controller.stream import Deliver, WatchSettings, stream
from treeline_operator.kube.errors import Forbidden, KubeError, NotFound
from treeline_operator.kube.metadata import Meta, list_metadata
from treeline_operator.kube.transport import Connection
from treeline_operator.world import Ref

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. An audit whose findings kopf has not told after ``grace_s`` means that its watch is dead."""

    watch: WatchSettings = field(default_factory=WatchSettings)
    audit_s: float = 60.0
    grace_s: float = 15.0
    absent_s: float = 30.0
    backoff_s: tuple[float, float] = (0.25, 20.0)
    patience_s: float = 5.0


Source = Callable[[Sequence[Watched], Sequence[str], Any, WatchSettings, Deliver], Coroutine[Any, Any, None]]
"""What :func:`stream` is: kinds, namespaces, the client's configuration, settings, and whom to tell."""


class Target(NamedTuple):
    """A kind in one namespace; an empty one means all."""

    watched: Watched
    namespace: str


class _Audited:
    """What the audits of one target have found."""

    def __init__(self) -> None:
        self.synced = asyncio.Event()
        self.wanted = asyncio.Event()
        self.unreadable = False
        self.trouble = ""
        self.fresh = _now()


@dataclass(slots=True)
class Informer:
    """All kinds. Optional ones come and go with :meth:`set_optional`."""

    cluster: Connection
    store: Store
    namespaces: Sequence[str] = ("",)
    timing: Timing = field(default_factory=Timing)
    source: Source = stream
    _audited: dict[Target, _Audited] = field(default_factory=dict)
    _audits: dict[Target, asyncio.Task[None]] = field(default_factory=dict)
    _streaming: asyncio.Task[None] | None = None
    _restart: asyncio.Event = field(default_factory=asyncio.Event)
    _heard: asyncio.Event = field(default_factory=asyncio.Event)
    _trouble: str = ""

    def start(self) -> None:
        """Begin to watch the kinds that are always there."""
        self._begin(KINDS)
        self._streaming = asyncio.create_task(self._stream(), name="kopf")

    async def set_optional(self, apis: Iterable[str]) -> frozenset[str]:
        """Watch exactly those optional kinds that are among ``apis``.

        Returns ``apis`` without what cannot be read, be it that it may not: nothing is to be built on it.
        """
        offered = frozenset(apis)
        wanted = {watched for watched in OPTIONAL if watched.api in offered}
        dropped = [t for t in self._audits if t.watched in OPTIONAL and t.watched not in wanted]
        for target in dropped:
            self._audits.pop(target).cancel()
            del self._audited[target]
            self.store.retain(target.watched.api_version, target.watched.kind, target.namespace, set(), "")
        if self._begin(wanted) or dropped:
            self._restart.set()
        new = {target: audited for target, audited in self._audited.items() if target.watched in wanted}
        waiting = [asyncio.create_task(audited.synced.wait()) for audited in new.values()]
        if waiting:
            await asyncio.wait(waiting, timeout=self.timing.patience_s)
            for task in waiting:
                task.cancel()
        return offered - {
            t.watched.api
            for t, a in new.items()
            if (a.unreadable or not a.synced.is_set()) and not self._closed(t.namespace)
        }

    async def synced(self) -> None:
        """Returns when the store has all that there was at the start. Raises as :meth:`watch` does."""
        waiting = [asyncio.create_task(audited.synced.wait()) for audited in self._audited.values()]
        watching = asyncio.create_task(self.watch())
        try:
            while any(not task.done() for task in waiting) and not watching.done():
                left = [task for task in waiting if not task.done()]
                await asyncio.wait((*left, watching), return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
        finally:
            for task in (watching, *waiting):
                task.cancel()

    async def watch(self) -> None:
        """Never returns; raises what ended one of the tasks, which is a defect."""
        while True:
            tasks = {*self._audits.values(), *([self._streaming] if self._streaming else [])}
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=5.0)
            for task in done:
                if not task.cancelled():
                    task.result()

    def ages(self) -> dict[str, float]:
        """Per kind the seconds since it was last known to be as the API server has it."""
        ages: dict[str, float] = {}
        for target, audited in self._audited.items():
            kind = target.watched.api
            ages[kind] = max(ages.get(kind, 0.0), _now() - audited.fresh)
        return ages

    def troubles(self) -> list[str]:
        """What cannot be read at the moment, and why."""
        found = [f"{t.watched.path(t.namespace)}: {a.trouble}" for t, a in self._audited.items() if a.trouble]
        return [*found, *([self._trouble] if self._trouble else [])]

    async def stop(self) -> None:
        """End all watches."""
        tasks = [*self._audits.values(), *([self._streaming] if self._streaming else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._audits.clear()

    # ---- events ---------------------------------------------------------------------------------------------

    async def _stream(self) -> None:
        """Runs kopf for the kinds that there are; again when these change, when it falls behind, and when it fails."""
        failures = 0
        while True:
            self._restart.clear()
            kinds = sorted(
                {t.watched for t, a in self._audited.items() if not a.unreadable}, key=lambda w: w.api
            )
            open_ = [namespace for namespace in self.namespaces if not self._closed(namespace)]
            begun = _now()
            running = asyncio.create_task(
                self.source(kinds, open_, self.cluster.configuration, self.timing.watch, self._see)
            )
            restart = asyncio.create_task(self._restart.wait())
            try:
                await asyncio.wait((running, restart), return_when=asyncio.FIRST_COMPLETED)
                if not running.done():
                    log.info("watching anew: %d kinds", len(kinds))
                    continue
                self._trouble = f"watching failed: {running.exception()}"
                log.warning(self._trouble)
            finally:
                for task in (running, restart):
                    task.cancel()
                await asyncio.gather(running, restart, return_exceptions=True)
            base, cap = self.timing.backoff_s
            failures = failures + 1 if _now() - begun < 2 * cap else 1
            await asyncio.sleep(min(cap, base * 2.0 ** min(failures, 20)) * random.uniform(0.5, 1.0))

    def _see(self, watched: Watched, type_: str | None, obj: dict[str, Any]) -> None:
        obj.setdefault("apiVersion", watched.api_version)
        obj.setdefault("kind", watched.kind)
        meta = obj["metadata"]
        if type_ == "DELETED":
            ref = Ref(watched.api_version, watched.kind, meta.get("namespace", ""), meta["name"])
            self.store.remove(ref, meta["uid"], meta["resourceVersion"])
        else:
            self.store.put(obj)
        self._trouble = ""
        self._heard.set()
        if type_ is None:  # kopf lists: whatever it does not name may have been deleted
            for target, audited in self._audited.items():
                if target.watched == watched and audited.synced.is_set():
                    audited.wanted.set()

    # ---- audits ---------------------------------------------------------------------------------------------

    def _begin(self, kinds: Iterable[Watched]) -> bool:
        """Whether any of them is new."""
        new = [Target(w, ns) for w in kinds for ns in self.namespaces if Target(w, ns) not in self._audits]
        for target in new:
            self._audited[target] = _Audited()
            path = target.watched.path(target.namespace)
            self._audits[target] = asyncio.create_task(self._audit_for_ever(target), name=f"audit {path}")
        return bool(new)

    async def _audit_for_ever(self, target: Target) -> None:
        audited, failures = self._audited[target], 0
        base, cap = self.timing.backoff_s
        while True:
            try:
                await self._audit(target, audited)
                failures, wait = 0, self.timing.audit_s
            except (NotFound, Forbidden) as exc:
                self._cannot(target, audited, exc)
                failures, wait = 0, self.timing.absent_s
            except KubeError as exc:
                failures += 1
                wait = min(cap, base * 2.0 ** min(failures, 20))
                if str(exc) != audited.trouble:
                    log.warning("%s: %s", target.watched.path(target.namespace), exc)
                    audited.trouble = str(exc)
            try:
                async with asyncio.timeout(wait * random.uniform(0.75, 1.0)):
                    await audited.wanted.wait()
                    await asyncio.sleep(base)  # a list of kopf names many
            except TimeoutError:
                pass

    async def _audit(self, target: Target, audited: _Audited) -> None:
        """Compare with a list; returns when kopf has told all that it named, or after the grace."""
        audited.wanted.clear()
        watched = target.watched
        items, version = await list_metadata(
            self.cluster, watched.plural, watched.path(target.namespace), watched.selector
        )
        named = {Ref(watched.api_version, watched.kind, meta.namespace, meta.name): meta for meta in items}
        if audited.unreadable:
            audited.unreadable = False
            self._restart.set()
        uids = {meta.uid for meta in named.values()}
        gone = self.store.retain(watched.api_version, watched.kind, target.namespace, uids, version)
        if gone and audited.synced.is_set():
            log.info("%d of %s were deleted unseen", gone, watched.path(target.namespace))
        behind = await self._await_told(named)
        if behind:
            audited.trouble = (
                f"{len(behind)} objects are newer than what was told of them, {behind[0]} for one"
            )
            log.warning("%s: %s", watched.path(target.namespace), audited.trouble)
            self._restart.set()
            return
        audited.trouble = ""
        audited.fresh = _now()
        audited.synced.set()

    async def _await_told(self, named: dict[Ref, Meta]) -> list[str]:
        """The objects that kopf has not told, when it has told none of them for the length of the grace."""
        while named := {ref: meta for ref, meta in named.items() if not self._is_told(ref, meta)}:
            left = len(named)
            try:
                async with asyncio.timeout(self.timing.grace_s):
                    while sum(not self._is_told(ref, meta) for ref, meta in named.items()) == left:
                        self._heard.clear()
                        await self._heard.wait()
                        await asyncio.sleep(0.05)  # many come together
            except TimeoutError:
                break
        return [ref.name for ref in named]

    def _is_told(self, ref: Ref, meta: Meta) -> bool:
        return self.store.has_seen(ref, meta.uid, meta.resourceVersion)

    def _cannot(self, target: Target, audited: _Audited, exc: KubeError) -> None:
        """The kind is not served, or it may not be read."""
        watched = target.watched
        if not audited.unreadable:
            audited.unreadable = True
            absent = "the API server does not serve it; is the CRD installed?"
            audited.trouble = absent if isinstance(exc, NotFound) else f"see the operator's role: {exc}"
            log.warning("%s: %s", watched.path(target.namespace), audited.trouble)
            self._restart.set()
        if isinstance(exc, NotFound) and watched.api_version != API_VERSION:
            self._forget(target, audited)
        elif isinstance(exc, NotFound) or watched in OPTIONAL:
            audited.fresh = _now()
        elif self._closed(target.namespace):
            for other, also in self._audited.items():
                if other.namespace == target.namespace:
                    self._forget(other, also)

    def _forget(self, target: Target, audited: _Audited) -> None:
        self.store.retain(target.watched.api_version, target.watched.kind, target.namespace, set(), "")
        audited.fresh = _now()
        audited.synced.set()

    def _closed(self, namespace: str) -> bool:
        """Whether nothing may be read in this namespace, and something in another."""
        unreadable = dict.fromkeys(self.namespaces, True)
        for target, audited in self._audited.items():
            if target.watched in KINDS:
                unreadable[target.namespace] &= audited.unreadable
        return unreadable[namespace] and not all(unreadable.values())


def _now() -> float:
    return asyncio.get_running_loop().time()
