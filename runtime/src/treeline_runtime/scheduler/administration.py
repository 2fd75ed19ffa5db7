"""What is done to the engine as a whole while no request runs: sleep, new weights; and traces of its steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from treeline_runtime.config import ConfigError
from treeline_runtime.messages import (
    FlushReq,
    Reply,
    SleepReq,
    StartProfileReq,
    StopProfileReq,
    UpdateWeightsReq,
    WakeReq,
)
from treeline_runtime.models.config import ModelError
from treeline_runtime.scheduler.cache import CacheManager
from treeline_runtime.scheduler.profiler import Profiler, ProfilerError
from treeline_runtime.scheduler.residence import AWAKE, Residence

logger = logging.getLogger(__name__)

BUSY = {"busy": True}
"""Data of a reply that would be another one once no request runs."""


class Administration:
    """Each of `handlers` answers its message with exactly one Reply, whatever goes wrong."""

    def __init__(
        self,
        residence: Residence,
        cache: CacheManager,
        profiler: Profiler,
        *,
        is_idle: Callable[[], bool],
        reply: Callable[[Reply], None],
    ) -> None:
        self._residence = residence
        self._cache = cache
        self._profiler = profiler
        self._is_idle = is_idle
        self._reply = reply
        self.handlers: Mapping[type, Callable[[Any], None]] = {
            FlushReq: self._answering(self._flush),
            SleepReq: self._answering(self._sleep),
            WakeReq: self._answering(self._wake),
            UpdateWeightsReq: self._answering(self._update),
            StartProfileReq: self._answering(self._start_profile),
            StopProfileReq: self._answering(self._stop_profile),
        }

    def _answering(self, handler: Callable[[Any], Reply]) -> Callable[[Any], None]:
        def handle(message: Any) -> None:
            started = time.perf_counter()
            try:
                reply = handler(message)
            except (ConfigError, ModelError, ProfilerError) as error:
                reply = Reply(message.id, ok=False, message=str(error))
            except Exception as error:
                logger.exception("a %s failed", type(message).__name__)
                reply = Reply(message.id, ok=False, message=f"internal error: {error!r}")
            if not isinstance(message, FlushReq):
                logger.info("%s: %s in %.2f s", message, reply.message or "done", time.perf_counter() - started)
            self._reply(reply)

        return handle

    def _busy(self, id: str) -> Reply | None:
        return None if self._is_idle() else Reply(id, ok=False, message="requests are running or waiting", data=BUSY)

    def _flush(self, message: FlushReq) -> Reply:
        if (busy := self._busy(message.id)) is not None:
            return busy
        self._cache.flush()
        return Reply(message.id)

    def _sleep(self, message: SleepReq) -> Reply:
        if self._residence.level != AWAKE:
            return Reply(message.id, ok=False, message=f"it sleeps already, at level {self._residence.level}")
        if (busy := self._busy(message.id)) is not None:
            return busy
        self._cache.flush()
        self._residence.sleep(message.level)
        return Reply(message.id, data={"level": message.level})

    def _wake(self, message: WakeReq) -> Reply:
        if self._residence.level == AWAKE:
            return Reply(message.id, ok=False, message="it is awake")
        self._residence.wake()
        return Reply(message.id)

    def _update(self, message: UpdateWeightsReq) -> Reply:
        if (busy := self._busy(message.id)) is not None:
            return busy
        self._residence.check(message.path)
        self._cache.flush()
        self._residence.update(message.path)
        return Reply(message.id)

    def _start_profile(self, message: StartProfileReq) -> Reply:
        self._profiler.start(message.folder, message.steps)
        return Reply(message.id)

    def _stop_profile(self, message: StopProfileReq) -> Reply:
        return Reply(message.id, data={"path": self._profiler.stop()})
