"""Record what CPU and GPU do in three decode steps: the data of the picture in docs/engine.md.

    python runtime/benchmarks/step_timeline.py --shape llama8b --out docs/img/step-timeline.json
    python scripts/step_timeline.py docs/img/step-timeline.json     # draws it

An engine with random weights continues `--batch` prompts of `--context` tokens. When `SKIP` decode steps of all of them
have been launched, torch's profiler follows the next `STEPS`, and three in their middle are kept. The CPU's lane shows
ranges around the scheduler's phases, which only this script makes; the GPU's lane shows CUPTI's record, also within
graphs. A kernel belongs to the step whose launch called it. The script prints the kind and the time of each kernel.
Times are microseconds.

With `--grammars` each sequence has its own JSON schema. Its allowed tokens are computed while the device computes
(`masks`), between the results of the step before and the step's own sampling (`sample`).

The profiler costs time, mostly on the CPU: steps are a little longer than without.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import random
import re
import shutil
import sys
import tempfile
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from engine import SHAPES, Bench
from structured import people
from torch.profiler import ProfilerActivity, record_function
from treeline_runtime import SamplingParams
from treeline_runtime.core import Batch, Phase
from treeline_runtime.sampling import Masks
from treeline_runtime.scheduler.executor import Executor
from treeline_runtime.scheduler.launched import Launched
from treeline_runtime.scheduler.scheduler import Scheduler

SKIP, STEPS, SHOWN = 30, 12, 3
PREFIX = "treeline:"
MERGED_US = 2.0
"""Work of one kind with no longer a gap is drawn as one piece."""
CALLS = ("cuda_runtime", "cuda_driver")
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
KINDS = {
    "attention": re.compile(r"decode_shares|merge_shares|extend|merge_splits|flash|attention|BatchDecode|BatchPrefill"),
    "products": re.compile(r"gemm|gemv|nvjet|cutlass|splitk|matrix|product|gate_up|down", re.IGNORECASE),
}
"""Kernels by name; all others are the rest."""


class Span(NamedTuple):
    what: str
    step: int
    start: float
    end: float


# ---- from a trace to two lanes ----------------------------------------------------------------------------


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if pattern.search(name)), "rest")


def cpu_lane(events: Iterable[Mapping[str, Any]]) -> list[Span]:
    """From the ranges of a Chrome trace, which lie within each other: at each moment the innermost."""
    ranges = _ranges(events)
    pieces = []
    for start, end in pairwise(sorted({edge for span in ranges for edge in (span.start, span.end)})):
        around = [span for span in ranges if span.start <= start and end <= span.end]
        if around:
            pieces.append(max(around, key=lambda span: (span.start, -span.end))._replace(start=start, end=end))
    return _merged(pieces, 0.0)


def gpu_lane(events: Iterable[Mapping[str, Any]]) -> list[Span]:
    """The device's work for the steps whose launches are in the trace."""
    events = list(events)
    launches = [span for span in _ranges(events) if span.what == "prepare"]
    starts = [span.start for span in launches]
    called = {_correlation(event): _start(event) for event in events if event.get("cat") in CALLS}
    called[None] = -1.0
    pieces = []
    for event in events:
        if event.get("cat") in DEVICE_WORK and event.get("ph") == "X":
            at = called.get(_correlation(event), -1.0)
            launch = bisect_right(starts, at) - 1
            if launch >= 0 and at <= launches[launch].end:
                kind = kind_of(event["name"]) if event["cat"] == "kernel" else "rest"
                pieces.append(Span(kind, launches[launch].step, _start(event), _start(event) + float(event["dur"])))
    return _merged(sorted(pieces, key=lambda span: span.start), MERGED_US)


def timeline(events: Iterable[Mapping[str, Any]]) -> dict[str, list[Span]]:
    """`cpu` and `gpu` while the device computes `SHOWN` steps in the middle of the trace, the first of which is step 0
    and begins at 0. Raises ValueError where the trace has fewer whole steps."""
    events = list(events)
    cpu, gpu = cpu_lane(events), gpu_lane(events)
    steps = sorted({span.step for span in gpu})[1:-1]  # the first and the last may be cut off
    if len(steps) < SHOWN:
        raise ValueError(f"the profiler saw {len(steps)} whole steps on the device, {SHOWN} are needed")
    first = steps[(len(steps) - SHOWN) // 2]
    shown = [span for span in gpu if first <= span.step < first + SHOWN]
    begin, end = shown[0].start, max(span.end for span in shown)

    def cut(spans: list[Span]) -> list[Span]:
        return [
            Span(span.what, span.step - first, max(span.start, begin) - begin, min(span.end, end) - begin)
            for span in spans
            if span.start < end and span.end > begin
        ]

    return {"cpu": cut(cpu), "gpu": cut(shown)}


def _ranges(events: Iterable[Mapping[str, Any]]) -> list[Span]:
    found = []
    for event in events:
        if event.get("cat") == "user_annotation" and event["name"].startswith(PREFIX):
            what, step = event["name"].removeprefix(PREFIX).split()
            found.append(Span(what, int(step), _start(event), _start(event) + float(event["dur"])))
    return sorted(found, key=lambda span: span.start)


def _correlation(event: Mapping[str, Any]) -> int | None:
    """The number that a call and its work on the device share; None without one."""
    found: int | None = event.get("args", {}).get("correlation")
    return found


def _start(event: Mapping[str, Any]) -> float:
    return float(event["ts"])


def _merged(spans: Iterable[Span], gap: float) -> list[Span]:
    merged: list[Span] = []
    for span in spans:
        if merged and merged[-1][:2] == span[:2] and span.start - merged[-1].end <= gap:
            merged[-1] = merged[-1]._replace(end=max(span.end, merged[-1].end))
        else:
            merged.append(span)
    return merged


# ---- the record ---------------------------------------------------------------------------------------------


class Recorder:
    """Names the phases of the scheduler's steps, and profiles some steps of `batch` sequences."""

    def __init__(self, batch: int, activities: Iterable[ProfilerActivity]) -> None:
        self._batch = batch
        self._profiler = torch.profiler.profile(activities=list(activities))
        self._numbers: dict[int, int] = {}
        """Numbers of launches by the `id` of their batch, which lives until its results are taken."""
        self._seen = self._launches = 0
        self._processed = 0
        self.events: list[Mapping[str, Any]] | None = None
        """The trace's events, once it has been made."""

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Makes the scheduler's phases ranges of the trace meanwhile. A batch has the number of its launch in all of
        them."""
        places: tuple[tuple[Any, str, str, Callable[..., int]], ...] = (
            (Scheduler, "step", "schedule", lambda _: self._launches + 1),
            (Scheduler, "_compute", "prepare", lambda _, batch: self._launched(batch)),
            (torch.cuda.CUDAGraph, "replay", "launch", lambda _: self._launches),
            (Scheduler, "_process", "process", lambda _, batch, *__: self._taken(batch)),
            (Launched, "result", "wait", lambda _: self._processed),
            (Scheduler, "_end_step", "send", lambda _: self._processed),
            (Executor, "sample_delayed", "sample", lambda *_: self._launches),
            (Masks, "fill", "masks", lambda *_: self._launches),
        )
        with contextlib.ExitStack() as stack:
            for owner, name, what, number in places:
                method = within_ranges(getattr(owner, name), what, number)
                stack.enter_context(mock.patch.object(owner, name, method))
            yield

    def _launched(self, batch: Batch) -> int:
        """Called before a launch → its number."""
        self._follow(batch)
        self._launches += 1
        self._numbers[id(batch)] = self._launches
        return self._launches

    def _taken(self, batch: Batch) -> int:
        """Called before results are taken → their launch's number; 0: it was before all others."""
        self._processed = self._numbers.pop(id(batch), 0)
        return self._processed

    def _follow(self, batch: Batch) -> None:
        """Starts the profiler, or stops it, where it is time."""
        if batch.phase is not Phase.DECODE or len(batch.reqs) != self._batch:
            return
        self._seen += 1
        if self._seen == SKIP:
            self._profiler.start()
        elif self._seen == SKIP + STEPS:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._profiler.stop()
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "trace.json"
                self._profiler.export_chrome_trace(str(path))
                self.events = json.loads(path.read_text())["traceEvents"]


def within_ranges(method: Callable[..., Any], what: str, number: Callable[..., int]) -> Callable[..., Any]:
    """`method`, each call of which is a range of this name. `number` is asked with the arguments of the call."""

    @functools.wraps(method)
    def named(*args: Any) -> Any:
        with record_function(f"{PREFIX}{what} {number(*args)}"):
            return method(*args)

    return named


class Constrained(Bench):
    """A benchmark in which all sequences have a grammar, and none ends early."""

    def run(self, batch: int, context: int, output: int) -> float:
        prompts = [random.choices(range(10, 4000), k=context) for _ in range(batch)]
        params = [
            SamplingParams(temperature=0.0, ignore_eos=True, max_new_tokens=output, grammar=people(i))
            for i in range(batch)
        ]
        started = time.perf_counter()
        self.engine.generate(prompts, params)
        return time.perf_counter() - started


def record(bench: Bench, batch: int, context: int) -> list[Mapping[str, Any]]:
    """The trace's events of some decode steps."""
    bench.run(batch, context, 2 * (SKIP + STEPS))  # warms up kernels, choices and caches
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with torch.profiler.profile(activities=activities):
        pass  # sets up Kineto and CUPTI, in this thread as they require, and outside of a step
    recorder = Recorder(batch, activities)
    with recorder.around():
        bench.run(batch, context, 2 * (SKIP + STEPS))  # some decode before the last prompt is computed
    if recorder.events is None:
        raise SystemExit(f"there were no {SKIP + STEPS} decode steps of {batch} sequences at once: choose fewer")
    return recorder.events


def tell_kernels(events: Iterable[Mapping[str, Any]]) -> None:
    """Prints each kernel's kind and total microseconds."""
    spent: Counter[tuple[str, str]] = Counter()
    for event in events:
        if event.get("cat") == "kernel":
            spent[kind_of(event["name"]), event["name"]] += event["dur"]
    for (kind, name), microseconds in sorted(spent.items(), key=lambda item: (item[0][0], -item[1])):
        sys.stderr.write(f"{kind:10} {microseconds:10.0f}  {name[:100]}\n")


def written(about: Mapping[str, Any], lanes: Mapping[str, list[Span]]) -> str:
    """JSON, a span a line: [what, step, start, end]."""
    lines = [f'"about": {json.dumps(about)}']
    for name, spans in lanes.items():
        rows = [json.dumps([what, step, round(start, 1), round(end, 1)]) for what, step, start, end in spans]
        lines.append(f'"{name}": [\n' + ",\n".join(rows) + "\n]")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024, metavar="TOKENS")
    parser.add_argument("--set", default="{}", metavar="JSON", help='fields of the configuration, {"page_size": 64}')
    parser.add_argument("--grammars", type=Path, metavar="FILE", help="each has a grammar; for this tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA device is needed: on a CPU a launch computes, and there is one lane")
    settings = {"max_graph_batch": args.batch} | json.loads(args.set)
    with tempfile.TemporaryDirectory() as folder:
        kind = Bench
        if args.grammars is not None:
            kind, settings = Constrained, settings | {"jump_forward": False}
            shutil.copy(args.grammars, Path(folder) / "tokenizer.json")
        events = record(kind(args.shape, Path(folder), settings), args.batch, args.context)
    tell_kernels(events)
    try:
        lanes = timeline(events)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    about = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "shape": args.shape,
        "batch": args.batch,
        "context": args.context + SKIP + STEPS // 2,
        "grammars": args.grammars is not None,
        "command": " ".join(["python", *sys.argv]),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(written(about, lanes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
