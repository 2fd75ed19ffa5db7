"""`treeline serve` whose scheduler process records some decode steps: what does the GPU wait for?

    PROFILE_BATCH=64 PROFILE_OUT=idle.json python -m profiled_scheduler --model …

With arguments it is the server, without any the scheduler process that the server starts. After `SKIP` decode steps of
PROFILE_BATCH sequences, torch's profiler follows the next `STEPS`, and the shares of `idle_shares` go into the file.
The profiler's record is the device's own (CUPTI): begin and end of each kernel and copy, also within CUDA graphs.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from treeline_runtime import processes, scheduler_process, serve
from treeline_runtime.core import Batch, Phase
from treeline_runtime.processes import run_child
from treeline_runtime.scheduler import Scheduler
from treeline_runtime.scheduler.launched import Launched

SKIP, STEPS = 50, 200
WAITING_US = 5.0
"""Gaps above this are waits for the host; shorter ones are between two kernels of a step."""
BEGINNING, END = 0.3, 0.95
"""Shares of the record's kernels between which it is read: starting and stopping the profiler disturb the rest."""
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def idle_shares(events: Iterable[Mapping[str, Any]], steps: int) -> dict[str, float]:
    """From the events of a Chrome trace (times in µs) of so many equal steps: `idle_share`, gaps of more than
    `WAITING_US` ÷ time; `gap_share`, all gaps ÷ time; `step_ms`. Work of several streams at once counts once.

    Raises ValueError if there is less than one kernel or copy a step.
    """
    spans = sorted(
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in events
        if event.get("cat") in DEVICE_WORK and event.get("ph") == "X"
    )
    if len(spans) < steps:
        raise ValueError(f"the profiler saw {len(spans)} kernels and copies in {steps} steps")
    looked_at = spans[int(BEGINNING * len(spans)) : int(END * len(spans))]
    busy_until, gaps = looked_at[0][1], []
    for start, end in looked_at[1:]:
        if start > busy_until:
            gaps.append(start - busy_until)
        busy_until = max(busy_until, end)
    time_us = busy_until - looked_at[0][0]
    return {
        "idle_share": sum(gap for gap in gaps if gap > WAITING_US) / time_us,
        "gap_share": sum(gaps) / time_us,
        "step_ms": time_us / (steps * len(looked_at) / len(spans)) / 1e3,
    }


class Recorder:
    """Counts launches, and profiles some of them."""

    def __init__(self, batch: int, out: Path) -> None:
        self._batch, self._out = batch, out
        self._seen = 0
        self._profiler: Any = None

    def before(self, batch: Batch) -> None:
        """Called before each launch."""
        if batch.phase is not Phase.DECODE or len(batch.reqs) != self._batch:
            return
        self._seen += 1
        if self._seen == SKIP:
            self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profiler.start()
        elif self._seen == SKIP + STEPS:
            torch.cuda.synchronize()
            self._profiler.stop()
            self._write()

    def _write(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            trace = json.loads(path.read_text())
        self._out.write_text(json.dumps(idle_shares(trace["traceEvents"], STEPS)))


def record() -> None:
    """From now on, in this process."""
    recorder = Recorder(int(os.environ["PROFILE_BATCH"]), Path(os.environ["PROFILE_OUT"]))
    original = Scheduler._compute

    def launch_recorded(self: Scheduler, batch: Batch) -> Launched:
        recorder.before(batch)
        return original(self, batch)

    Scheduler._compute = launch_recorded  # type: ignore[method-assign]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        processes.MODULES["scheduler"] = "profiled_scheduler"
        sys.exit(serve.main())
    record()
    sys.exit(run_child("scheduler", scheduler_process.run))
