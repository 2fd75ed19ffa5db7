"""Names of adapters, and their way to the host and away from it. Slots on the device are `slots`'s."""

from __future__ import annotations

import logging
import os
import queue
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from treeline_runtime.config import ConfigError, SchedulerConfig
from treeline_runtime.core import Req
from treeline_runtime.messages import FinishReason, LoadAdapterReq, Reply, UnloadAdapterReq
from treeline_runtime.models.adapters import Adapter, find_adapter
from treeline_runtime.models.config import ModelError
from treeline_runtime.scheduler.administration import AWAKE, Refused, Residence
from treeline_runtime.scheduler.audit import CacheAudits
from treeline_runtime.scheduler.cache import CacheManager
from treeline_runtime.scheduler.grammars import Grammars

logger = logging.getLogger(__name__)

NO_ROOT = (
    "this server loads no adapters while it runs: start it with --lora-root DIR, the folder below which they may be, "
    "or name this one in --lora-modules"
)
MOST_NAMES = 1024
"""Adapters that are loaded at once: every report of load names them, and pickers read lists of at most 4096 models."""
MOST_SAID = 1000
"""Characters of a refusal, which may quote what a file says."""


class Adapters:
    """Files are read in a thread of its own, and steps go on meanwhile. Names are of this engine; all ranks know
    adapters by their digests."""

    def __init__(
        self,
        config: SchedulerConfig,
        residence: Residence,
        cache: CacheManager,
        audits: CacheAudits,
        grammars: Grammars,
        reply: Callable[[Reply], None],
        wake: Callable[[], None],
    ) -> None:
        """wake: called in any thread when `take_ready` has something."""
        self._root, self._residence, self._slots = config.lora_root, residence, cache.slots
        self._audits, self._grammars, self._reply, self._wake = audits, grammars, reply, wake
        self.names: dict[str, str] = {}
        """Name → digest; replaced as a whole."""
        self.pending = 0
        """Adapters that are being read, or have been and are not answered for."""
        self._reading = ThreadPoolExecutor(1, "treeline adapters")
        self._read: queue.SimpleQueue[tuple[LoadAdapterReq, str, Future[Adapter], float]] = queue.SimpleQueue()
        self.handlers: Mapping[type, Callable[[Any], None]] = {
            LoadAdapterReq: self._load,
            UnloadAdapterReq: self._unload,
        }

    def load_now(self, modules: tuple[str, ...]) -> None:
        """Loads NAME=PATH each, before any request. Raises ModelError."""
        for name, _, path in (module.partition("=") for module in modules):
            folder = os.path.abspath(path)  # a rank's process may have another working directory
            try:
                self._add(name, folder, self._residence.read_adapter(folder))
            except (ModelError, Refused) as error:
                raise ModelError(f"--lora-modules {name}={path}: {error}") from None

    def close(self) -> None:
        self._reading.shutdown(wait=False, cancel_futures=True)

    # ---- messages -----------------------------------------------------------------------------------------

    def _load(self, message: LoadAdapterReq) -> None:
        try:
            if not self._root:
                raise Refused(NO_ROOT)
            folder = str(find_adapter(message.path, self._root))
        except (ModelError, Refused) as error:
            self._answer(message, error)
            return
        self.pending += 1
        future = self._reading.submit(self._residence.read_adapter, folder)
        future.add_done_callback(partial(self._done, message, folder, time.perf_counter()))

    def _done(self, message: LoadAdapterReq, folder: str, started: float, future: Future[Adapter]) -> None:
        self._read.put((message, folder, future, started))
        self._wake()

    def take_ready(self) -> bool:
        """Answers for adapters that have been read. Returns whether there were any."""
        found = False
        while not self._read.empty():
            message, folder, future, started = self._read.get()
            found = True
            self.pending -= 1
            try:
                adapter = future.result()
                self._add(message.name, folder, adapter)
            except Exception as error:
                self._answer(message, error)
                continue
            seconds = time.perf_counter() - started
            logger.info("adapter %r, rank %d, from %s: %.2f s", message.name, adapter.rank, folder, seconds)
            self._reply(Reply(message.id, data={"digest": adapter.digest}))
        return found

    def _add(self, name: str, folder: str, adapter: Adapter) -> None:
        if self._residence.level != AWAKE:
            raise Refused("the engine is asleep: /wake_up first")
        known = self.names.get(name)
        if known not in (None, adapter.digest):
            raise Refused(f"another adapter is loaded as {name!r}: unload it first")
        if known is None and len(self.names) >= MOST_NAMES:
            raise Refused(f"{MOST_NAMES} adapters are loaded, the most at once: unload one first")
        if adapter.digest not in self._residence.adapters:
            self._residence.load_adapter((folder, adapter.digest), adapter)
        self.names = self.names | {name: adapter.digest}

    def refused(self, req: Req) -> FinishReason | None:
        """A 404 for a request whose adapter was unloaded on its way here."""
        if req.adapter is None or req.adapter in self._residence.adapters:
            return None
        return FinishReason("error", message="the request's adapter has been unloaded", status=404)

    def _is_used(self, digest: str) -> bool:
        return self._slots.uses(digest) or any(req.adapter == digest for req in self._grammars.reqs())

    def _unload(self, message: UnloadAdapterReq) -> None:
        digest = self.names.get(message.name)
        if digest is None:
            self._reply(Reply(message.id))  # the answer to an earlier one may have been lost
            return
        others = [name for name, other in self.names.items() if other == digest and name != message.name]
        if not others:
            self._audits.drop()
        if not others and self._is_used(digest):
            self._reply(Reply(message.id, ok=False, message="requests use the adapter", data={"busy": True}))
            return
        self.names = {name: other for name, other in self.names.items() if name != message.name}
        if not others:
            self._slots.drop(digest)
            self._residence.drop_adapter(digest)
        logger.info("adapter %r is unloaded", message.name)
        self._reply(Reply(message.id))

    def _answer(self, message: LoadAdapterReq, error: Exception) -> None:
        text = str(error)[:MOST_SAID]
        if not isinstance(error, ConfigError | ModelError | Refused):
            logger.error("loading the adapter %r failed", message.name, exc_info=error)
            text = f"internal error: {error!r}"
        self._reply(Reply(message.id, ok=False, message=text))
