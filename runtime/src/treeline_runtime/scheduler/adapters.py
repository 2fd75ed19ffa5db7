"""Names of adapters, and their way between disk and host. Slots on the device are `slots`'s."""

from __future__ import annotations

import logging
import os
import queue
import time
from collections.abc import Callable, Container, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from treeline_runtime.config import ConfigError, SchedulerConfig
from treeline_runtime.core import Req
from treeline_runtime.messages import FinishReason, LoadAdapterReq, Reply, UnloadAdapterReq
from treeline_runtime.models.adapters import Adapter, find_adapter
from treeline_runtime.models.config import ModelError
from treeline_runtime.scheduler.administration import AWAKE, Refused, Residence
from treeline_runtime.scheduler.audit import CacheAudits
from treeline_runtime.scheduler.cache import CacheManager

logger = logging.getLogger(__name__)

NO_ROOT = (
    "this server loads no adapters while it runs: start it with --lora-root DIR, the folder below which they may be, "
    "or name this one in --lora-modules"
)
MOST_NAMES = 1024
"""Adapters that are loaded at once: every report of load names them, and pickers read lists of at most 4096 models."""
LOST = "the adapter's files have changed since it was loaded, or cannot be read: load it again"
MOST_SAID = 1000
"""Characters of a refusal, which may quote what a file says."""


@dataclass(slots=True)
class _Known:
    """A loaded adapter."""

    folders: dict[str, str]
    """Name → where its files are, without those that could not be read again."""
    num_bytes: int
    """On the host."""


class Adapters:
    """Files are read in a thread of its own, and steps go on meanwhile. Names are of this engine; all ranks know
    adapters by their digests.

    The host has room for some of them. When another one needs it, the one that was asked for least recently leaves,
    unless a slot is about to be filled from it; once a request needs it, its files are read again.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        most_bytes: int,
        residence: Residence,
        cache: CacheManager,
        audits: CacheAudits,
        reqs: Callable[[], Iterable[Req]],
        finish: Callable[[Req, FinishReason], None],
        reply: Callable[[Reply], None],
        wake: Callable[[], None],
    ) -> None:
        """most_bytes: of adapters on the host of a rank, besides one that was just read. reqs: all that have not ended.
        wake: called in any thread when `step` has something."""
        self._root, self._most_bytes = config.lora_root, most_bytes
        self.max_loras = config.max_loras if config.serves_adapters else 0
        """0: there will be no adapters, and nothing to do in a step."""
        self._residence, self._slots, self._audits = residence, cache.slots, audits
        self._reqs, self._finish, self._reply, self._wake = reqs, finish, reply, wake
        self.names: dict[str, str] = {}
        """Name → digest; replaced as a whole."""
        self.served: dict[str, str] = {}
        """Those of them that can be computed with."""
        self._known: dict[str, _Known] = {}
        """By digest, in the order in which requests asked for them."""
        self._loading: list[LoadAdapterReq] = []
        self._rereading: str | None = None
        self._read: queue.SimpleQueue[tuple[LoadAdapterReq | str, str, Future[Adapter], float]] = queue.SimpleQueue()
        """What was read: for a message, or again, the adapter of this digest; its folder; since when."""
        self.handlers: Mapping[type, Callable[[Any], None]] = {
            LoadAdapterReq: self._load,
            UnloadAdapterReq: self._unload,
        }

    def load_now(self, modules: tuple[str, ...]) -> None:
        """Loads NAME=PATH each, before any request. Raises ModelError."""
        for name, _, path in (module.partition("=") for module in modules):
            folder = os.path.abspath(path)  # a rank's process may have another working directory
            try:
                self._add(name, folder, self._residence.begin_read(folder))
            except (ModelError, Refused) as error:
                raise ModelError(f"--lora-modules {name}={path}: {error}") from None

    def close(self) -> None:
        self._residence.stop_reading()

    def step(self) -> bool:
        """Takes adapters that have been read, and begins to read what a request needs. Returns whether there were any
        of the former."""
        found = False
        while not self._read.empty():
            purpose, folder, future, started = self._read.get()
            found = True
            if isinstance(purpose, str):
                self._take_again(purpose, folder, future)
            elif purpose in self._loading:
                self._loading.remove(purpose)
                self._take(purpose, folder, future, started)
            else:
                self._residence.end_read()
                self._answer(purpose, Refused("it was unloaded meanwhile"))
        wanted, self._slots.wanted = self._slots.wanted or "", None
        known = self._known.get(wanted)
        if known is not None and known.folders and self._rereading is None and self._has_room(wanted):
            self._rereading = wanted
            self._begin(wanted, next(iter(known.folders.values())))
        return found

    def load_fields(self) -> dict[str, Any]:
        """What LoadUpdate has of adapters."""
        fields: dict[str, Any] = {"digests": self.served, "max_loras": self.max_loras}
        if running := self._slots.running:
            fields["running_adapters"] = self._named(running)
        if waiting := self._slots.waiting:
            fields["waiting_adapters"] = self._named(waiting)
        fields["lost_adapters"] = [*self.names.keys() - self.served.keys()]
        return fields

    def _named(self, digests: Container[str]) -> list[str]:
        return [name for name, digest in self.names.items() if digest in digests]

    def _begin(self, purpose: LoadAdapterReq | str, folder: str) -> None:
        started = time.perf_counter()

        def done(future: Future[Adapter]) -> None:
            self._read.put((purpose, folder, future, started))
            self._wake()

        self._residence.begin_read(folder).add_done_callback(done)

    # ---- messages -----------------------------------------------------------------------------------------

    def _load(self, message: LoadAdapterReq) -> None:
        try:
            if not self._root:
                raise Refused(NO_ROOT)
            folder = str(find_adapter(message.path, self._root))
        except (ModelError, Refused) as error:
            self._answer(message, error)
            return
        self._loading.append(message)
        self._begin(message, folder)

    def _take(self, message: LoadAdapterReq, folder: str, future: Future[Adapter], started: float) -> None:
        try:
            adapter = self._add(message.name, folder, future, message.digest)
        except Exception as error:
            self._answer(message, error)
            return
        seconds = time.perf_counter() - started
        logger.info("adapter %r, rank %d, from %s: %.2f s", message.name, adapter.rank, folder, seconds)
        self._reply(Reply(message.id, data={"digest": adapter.digest}))

    def _add(self, name: str, folder: str, future: Future[Adapter], wanted: str = "") -> Adapter:
        """Ends the reading that was begun first. Raises ModelError or Refused."""
        try:
            adapter = future.result()
            self._check(name, adapter, wanted)
        except Exception:
            self._residence.end_read()
            raise
        digest, size = adapter.digest, adapter.num_bytes
        known = self._known.pop(digest, None)
        self._residence.end_read(digest if known is None else None)  # one that had to leave comes back when it is used
        self._known[digest] = _Known({**(known.folders if known else {}), name: folder}, size)
        self._rename(self.names | {name: digest})
        self._make_room()
        return adapter

    def _check(self, name: str, adapter: Adapter, wanted: str) -> None:
        if not adapter.digest.startswith(wanted):
            raise Refused(f"the digest of the files is {adapter.digest}, and {wanted} is wanted")
        if self._residence.level != AWAKE:
            raise Refused("the engine is asleep: /wake_up first")
        known = self.names.get(name)
        if known not in (None, adapter.digest):
            raise Refused(f"another adapter is loaded as {name!r}: unload it first")
        if known is None and len(self.names) >= MOST_NAMES:
            raise Refused(f"{MOST_NAMES} adapters are loaded, the most at once: unload one first")
        if (size := adapter.num_bytes) > self._most_bytes:
            raise Refused(
                f"the adapter takes {size} bytes of host memory, and all together may have {self._most_bytes}: start "
                "the server with a larger --max-lora-memory"
            )

    def _unload(self, message: UnloadAdapterReq) -> None:
        self._loading = [loading for loading in self._loading if loading.name != message.name]
        digest = self.names.get(message.name)
        if digest is None:
            self._reply(Reply(message.id))  # the answer to an earlier one may have been lost
            return
        others = [name for name, other in self.names.items() if other == digest and name != message.name]
        if not others:
            self._audits.drop()
        if not others and (self._slots.uses(digest) or any(req.adapter == digest for req in self._reqs())):
            self._reply(Reply(message.id, ok=False, message="requests use the adapter", data={"busy": True}))
            return
        self._known[digest].folders.pop(message.name, None)
        self._rename({name: other for name, other in self.names.items() if name != message.name})
        if others and not self._known[digest].folders:
            self._give_up(digest)
        if not others:
            self._slots.drop(digest)
            self._slots.away.discard(digest)
            if digest in self._residence.adapters:
                self._residence.drop_adapter(digest)
            del self._known[digest]
        logger.info("adapter %r is unloaded", message.name)
        self._reply(Reply(message.id))

    def _rename(self, names: dict[str, str]) -> None:
        self.names = names
        self.served = {name: digest for name, digest in names.items() if self._known[digest].folders}

    def _answer(self, message: LoadAdapterReq, error: Exception) -> None:
        text = str(error)[:MOST_SAID]
        if not isinstance(error, ConfigError | ModelError | Refused):
            logger.error("loading the adapter %r failed", message.name, exc_info=error)
            text = f"internal error: {error!r}"
        self._reply(Reply(message.id, ok=False, message=text))

    # ---- host memory --------------------------------------------------------------------------------------

    def refused(self, req: Req) -> FinishReason | None:
        """An error for a request whose adapter was unloaded on its way here, or cannot be read again."""
        if req.adapter is None:
            return None
        if (known := self._known.pop(req.adapter, None)) is None:
            return FinishReason("error", message="the request's adapter has been unloaded", status=404)
        self._known[req.adapter] = known
        return None if known.folders else FinishReason("error", message=LOST, status=500)

    def _has_room(self, wanted: str) -> bool:
        """Whether it fits beside those that wait for a slot."""
        kept = sum(self._known[one].num_bytes for one in self._residence.adapters if self._slots.needs_host(one))
        return kept + self._known[wanted].num_bytes <= self._most_bytes

    def _make_room(self) -> None:
        host = self._residence.adapters
        used = sum(self._known[digest].num_bytes for digest in host)
        for digest, known in self._known.items():
            if used <= self._most_bytes:
                break
            if digest in host and not self._slots.needs_host(digest):
                self._residence.drop_adapter(digest)
                self._slots.away.add(digest)
                used -= known.num_bytes

    def _take_again(self, digest: str, folder: str, future: Future[Adapter]) -> None:
        self._rereading, known = None, self._known.get(digest)
        if known is None or self._residence.level != AWAKE or digest in self._residence.adapters:
            self._residence.end_read()
            return
        problem = future.exception()
        try:
            self._residence.end_read(digest if problem is None else None)
        except ModelError as error:
            problem = error
        if problem is not None:
            self._lose(digest, known, folder, problem)
            return
        self._slots.away.discard(digest)
        self._make_room()

    def _lose(self, digest: str, known: _Known, folder: str, error: BaseException) -> None:
        """Another name's files may still be good: they are read next."""
        logger.error("the adapter in %s cannot be read again: %s", folder, error)
        known.folders = {name: other for name, other in known.folders.items() if other != folder}
        if not known.folders:
            self._give_up(digest)

    def _give_up(self, digest: str) -> None:
        """Its requests without a slot end, and none comes in until it is loaded again."""
        self._rename(self.names)
        for req in self._reqs():
            if req.adapter == digest and req.row < 0 and (finish := self.refused(req)) is not None:
                self._finish(req, finish)
