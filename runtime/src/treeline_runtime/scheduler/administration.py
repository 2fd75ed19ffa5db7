"""What is done to the engine as a whole while no request runs: sleep, new weights; and traces of its steps."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from treeline_runtime.config import ConfigError
from treeline_runtime.messages import (
    MAX_PROFILE_STEPS,
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
from treeline_runtime.scheduler.residence import AWAKE, Residence

logger = logging.getLogger(__name__)

BUSY = {"busy": True}
"""Data of a reply that would be another one once no request runs."""


class ProfilerError(Exception):
    """The profiler cannot do that now."""


class Profiler:
    """A trace of some steps by torch's profiler, for chrome://tracing or Perfetto; at most one at a time. `step` is
    called after each step that launched something."""

    def __init__(self, device: torch.device) -> None:
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._running: profile | None = None
        self._folder = Path()
        self._left = 0
        self._count = 0

    def start(self, folder: str, steps: int) -> None:
        """Trace the next so many steps. Raises ProfilerError."""
        if self._running is not None:
            raise ProfilerError(f"a profile is running, {self._left} steps are left: POST /stop_profile ends it")
        if not 1 <= steps <= MAX_PROFILE_STEPS:
            raise ProfilerError(f"a profile has 1 to {MAX_PROFILE_STEPS} steps, not {steps}")
        self._folder = Path(folder)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ProfilerError(f"cannot write to the profile folder: {error}") from None
        self._left = steps
        running = profile(activities=self._activities)
        running.start()
        self._running = running

    def step(self) -> None:
        if self._running is None:
            return
        self._left -= 1
        if self._left == 0:
            try:
                self.stop()
            except ProfilerError:
                logger.exception("the profile is lost")

    def stop(self) -> str:
        """→ the trace's file. Raises ProfilerError."""
        running, self._running = self._running, None
        if running is None:
            raise ProfilerError("no profile is running: it has reached its steps, or was never started")
        running.stop()
        self._count += 1
        now = time.strftime("%Y%m%d-%H%M%S")
        path = self._folder / f"treeline-scheduler-{now}-{os.getpid()}-{self._count}.trace.json.gz"
        try:
            running.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            raise ProfilerError(f"the trace could not be written to {path}: {error}") from None
        logger.info("profile: %s", path)
        return str(path)


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
