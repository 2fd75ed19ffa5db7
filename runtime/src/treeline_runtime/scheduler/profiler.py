"""A trace of some steps, by torch's profiler: what the CPU did, and the device, for chrome://tracing or Perfetto."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from treeline_runtime.messages import MAX_PROFILE_STEPS

logger = logging.getLogger(__name__)


class ProfilerError(Exception):
    """The profiler cannot do that now."""


class Profiler:
    """At most one trace at a time. `step` is called after each step that launched something."""

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
