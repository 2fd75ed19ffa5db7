"""Keeps the store equal to the cluster: one list and watch per kind and namespace, and how fresh each of them is.

An own loop instead of a framework's, since three things must be seen that frameworks for handlers swallow: where a
list ends (what it does not name any more was deleted while nobody watched), bookmarks (the only sign of life of a
quiet watch), and that every kind has been listed once (an empty one calls no handler).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgspec

from treeline_operator.controller.kinds import KINDS, OPTIONAL, Watched
from treeline_operator.controller.store import Store
from treeline_operator.kube.errors import Forbidden, Gone, KubeError, NotFound, Unauthorized, error_of
from treeline_operator.world import Ref

log = logging.getLogger(__name__)

_PAGE: Final = 250
_YIELD_EVERY: Final = 50


Stream = AbstractAsyncContextManager[AsyncIterator[bytes]]


class Reader(Protocol):
    """The two reads that an informer needs. Both raise KubeError."""

    async def page(self, path: str, query: dict[str, str]) -> bytes:
        """The body of a GET."""

    def lines(self, path: str, query: dict[str, str], idle_s: float) -> Stream:
        """The lines of a streamed GET. TimeoutError where none arrives for ``idle_s``."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. A bookmark comes every minute, so a watch that is silent for longer than ``idle_s`` is dead."""

    idle_s: float = 70.0
    watch_s: tuple[float, float] = (300.0, 600.0)
    backoff_s: tuple[float, float] = (0.25, 20.0)
    absent_s: float = 60.0
    patience_s: float = 5.0


class _ListMeta(msgspec.Struct):
    resourceVersion: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class _Page(msgspec.Struct):
    metadata: _ListMeta
    items: list[msgspec.Raw] = []


class _Line(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Meta(msgspec.Struct):
    resourceVersion: str = ""


class _Bookmark(msgspec.Struct):
    metadata: _Meta


class _Status(msgspec.Struct):
    code: int = 500


_decode_page = msgspec.json.Decoder(_Page).decode
_decode_line = msgspec.json.Decoder(_Line).decode


class Reflector:
    """One kind in one namespace (or in all): lists, watches, lists again where the watch lost its place."""

    def __init__(
        self,
        watched: Watched,
        namespace: str,
        reader: Reader,
        store: Store,
        timing: Timing,
        *,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.watched = watched
        self.namespace = namespace
        self.synced = asyncio.Event()
        self.trouble = ""
        """Why nothing is learnt at the moment; empty while all is well."""
        self._path = watched.path(namespace)
        self._reader = reader
        self._store = store
        self._timing = timing
        self._chance = chance
        self._version: str | None = None
        self._failures = 0
        self._seen = _now()

    def age(self) -> float:
        """Seconds since the API server last said anything about the kind."""
        return _now() - self._seen

    async def run(self) -> None:
        """For ever."""
        while True:
            wait = 0.0
            try:
                if self._version is None:
                    self._version = await self._list()
                wait = await self._watch(self._version)
            except KubeError as exc:
                wait = self._refused(exc)
            except msgspec.MsgspecError as exc:
                self._version = None
                wait = self._failed(f"not understood: {exc}")
            await asyncio.sleep(wait)

    async def _list(self) -> str:
        uids: set[str] = set()
        self._store.begin_list(self.watched.api_version, self.watched.kind, self.namespace)
        query = {"limit": str(_PAGE), **self._selector()}
        while True:
            page = _decode_page(await self._reader.page(self._path, query))
            for number, raw in enumerate(page.items, start=1):
                uids.add(self._put(msgspec.json.decode(raw)))
                if number % _YIELD_EVERY == 0:
                    await asyncio.sleep(0)
            self._heard()
            if not page.metadata.continue_:
                break
            query["continue"] = page.metadata.continue_
        version = page.metadata.resourceVersion
        self._failures = 0
        gone = self._store.retain(self.watched.api_version, self.watched.kind, self.namespace, uids, version)
        log.debug("listed %s: %d objects, %d had gone", self._path, len(uids), gone)
        self.synced.set()
        return version

    async def _watch(self, version: str) -> float:
        """Until the stream ends or goes silent; returns how long to wait before the next one."""
        lowest, highest = self._timing.watch_s
        seconds = lowest + (highest - lowest) * self._chance()
        query = {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": version}
        query |= {"timeoutSeconds": str(max(1, round(seconds))), **self._selector()}
        begun = _now()
        try:
            async with self._reader.lines(self._path, query, self._timing.idle_s) as lines:
                self._heard()
                async for line in lines:
                    self._event(_decode_line(line))
                    self._heard()
                    self._failures = 0
        except TimeoutError:
            log.info("the watch of %s is silent, starting another", self._path)
        # A server that ends each watch at once must not be asked in a tight loop.
        return 0.0 if _now() - begun > 1.0 else 0.5 + 0.5 * self._chance()

    def _event(self, line: _Line) -> None:
        match line.type:
            case "ADDED" | "MODIFIED":
                obj = msgspec.json.decode(line.object)
                self._put(obj)
                self._version = obj["metadata"]["resourceVersion"]
            case "DELETED":
                obj = msgspec.json.decode(line.object)
                meta = obj["metadata"]
                ref = Ref(
                    self.watched.api_version, self.watched.kind, meta.get("namespace", ""), meta["name"]
                )
                self._store.remove(ref, meta["uid"], meta["resourceVersion"])
                self._version = meta["resourceVersion"]
            case "BOOKMARK":
                self._version = msgspec.json.decode(line.object, type=_Bookmark).metadata.resourceVersion
            case _:
                code = msgspec.json.decode(line.object, type=_Status).code
                raise error_of(code, bytes(line.object), None, f"watch {self._path}")

    def _put(self, obj: dict[str, Any]) -> str:
        obj.setdefault("apiVersion", self.watched.api_version)
        obj.setdefault("kind", self.watched.kind)
        self._store.put(obj)
        uid: str = obj["metadata"]["uid"]
        return uid

    def _selector(self) -> dict[str, str]:
        return {"labelSelector": self.watched.selector} if self.watched.selector else {}

    def _heard(self) -> None:
        self._seen = _now()
        if self.trouble:
            log.info("%s is read again", self._path)
            self.trouble = ""

    def _refused(self, exc: KubeError) -> float:
        """Note what the API server said, and return for how long to wait."""
        match exc:
            case Gone():
                log.info("the watch of %s lost its place, listing again", self._path)
                wait = 0.0 if self._version is not None else self._failed(str(exc))
                self._version = None
                return wait
            case NotFound():
                self._version = None
                self._store.retain(self.watched.api_version, self.watched.kind, self.namespace, set(), "")
                self._seen = _now()
                self._failed("the API server does not serve it; is the CRD installed?")
                # An absent kind has no objects, and that is known.
                self.synced.set()
                return self._timing.absent_s
            case Forbidden():
                self._failed(f"may not be read, see the operator's role: {exc}")
                return self._timing.backoff_s[1]
            case _:
                if self._failures >= 3 or isinstance(exc, Unauthorized):
                    self._version = None  # a list answers whatever it dislikes, and logs in anew
                return max(self._failed(str(exc)), exc.retry_after_s or 0.0)

    def _failed(self, trouble: str) -> float:
        """Note why, aloud if it is new, and return for how long to wait."""
        if trouble != self.trouble:
            log.warning("%s: %s", self._path, trouble)
            self.trouble = trouble
        self._failures += 1
        base, cap = self._timing.backoff_s
        return min(cap, base * 2.0 ** min(self._failures - 1, 20)) * (1.0 - 0.5 * self._chance())


@dataclass(slots=True)
class Informer:
    """All reflectors. Optional kinds come and go with :meth:`set_optional`."""

    reader: Reader
    store: Store
    namespaces: Sequence[str] = ("",)
    timing: Timing = Timing()
    _reflectors: dict[tuple[Watched, str], Reflector] = field(default_factory=dict)
    _tasks: dict[tuple[Watched, str], asyncio.Task[None]] = field(default_factory=dict)

    def start(self) -> None:
        """Begin to list and watch the kinds that are always there."""
        self._begin(KINDS)

    async def set_optional(self, apis: Iterable[str]) -> frozenset[str]:
        """Watch exactly those optional kinds that are among ``apis``.

        Returns ``apis`` without what cannot be read, be it that it may not: nothing is to be built on it.
        """
        offered = frozenset(apis)
        wanted = {watched for watched in OPTIONAL if watched.api in offered}
        for key in [key for key in self._tasks if key[0] in OPTIONAL and key[0] not in wanted]:
            self._tasks.pop(key).cancel()
            del self._reflectors[key]
            watched, namespace = key
            self.store.retain(watched.api_version, watched.kind, namespace, set(), "")
        self._begin(wanted)
        new = [reflector for (watched, _), reflector in self._reflectors.items() if watched in wanted]
        with suppress(TimeoutError):
            async with asyncio.timeout(self.timing.patience_s):
                for reflector in new:
                    await reflector.synced.wait()
        return offered - {reflector.watched.api for reflector in new if not reflector.synced.is_set()}

    async def synced(self) -> None:
        """Returns when every kind has been listed."""
        for reflector in list(self._reflectors.values()):
            await reflector.synced.wait()

    async def watch(self) -> None:
        """Never returns; raises what ended a reflector, which is a defect."""
        while True:
            done, _ = await asyncio.wait(
                self._tasks.values(), return_when=asyncio.FIRST_COMPLETED, timeout=5.0
            )
            for task in done:
                if not task.cancelled():
                    task.result()

    def ages(self) -> dict[str, float]:
        """Per kind the seconds since it was last heard of, in the namespace where that is longest ago."""
        ages: dict[str, float] = {}
        for reflector in self._reflectors.values():
            kind = reflector.watched.api
            ages[kind] = max(ages.get(kind, 0.0), reflector.age())
        return ages

    def troubles(self) -> list[str]:
        """What cannot be read at the moment, and why."""
        return [f"{r.watched.path(r.namespace)}: {r.trouble}" for r in self._reflectors.values() if r.trouble]

    async def stop(self) -> None:
        """End all watches."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()

    def _begin(self, kinds: Iterable[Watched]) -> None:
        for watched in kinds:
            for namespace in self.namespaces:
                key = (watched, namespace)
                if key in self._tasks:
                    continue
                reflector = Reflector(watched, namespace, self.reader, self.store, self.timing)
                self._reflectors[key] = reflector
                self._tasks[key] = asyncio.create_task(
                    reflector.run(), name=f"watch {watched.path(namespace)}"
                )


def _now() -> float:
    return asyncio.get_running_loop().time()
