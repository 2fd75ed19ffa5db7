"""Workloads under ablations: a new server per ablation, an empty cache per workload."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from treeline_bench.context import BenchmarkError, Display
from treeline_bench.programs.ablations import FULL, NONE, Ablation, Serving
from treeline_bench.programs.figures import Measured
from treeline_bench.programs.record import Recorded, compare, hits
from treeline_bench.programs.speculation import call_ratios
from treeline_bench.programs.workloads import Batch, Data, Workload
from treeline_bench.prompts import PromptMaker

AT_ONCE = 64
"""Programs of a batch, as in the paper."""
ALONE = 2
"""Programs whose latency is measured."""
WARM_UP, WARM_UP_ON_GPU = 0.2, 1.0
"""The length of a warm-up program relative to measured ones: a GPU's kernels are compiled for the sizes they meet
first."""


@dataclass(frozen=True)
class Plan:
    """The runs of a benchmark. `programs`: number for each workload; None: the workload's own."""

    workloads: Sequence[Workload]
    ablations: Sequence[Ablation]
    scale: float
    programs: int | None = None
    seed: int = 1
    extraction: bool = False
    """Whether API speculation is measured, on the full server."""
    warm_up: float = WARM_UP

    def batch(
        self, workload: Workload, maker: PromptMaker, part: str, programs: int | None = None, length: float = 1.0
    ) -> Batch:
        """`part`: of the run; each has different texts, of `scale` length."""
        data = Data(maker, f"{self.seed} {workload.name} {part}", self.scale * length)
        return workload.make(data, programs or self.programs or workload.programs)


@dataclass
class Ran:
    table: dict[str, dict[str, Measured]]
    """Workload → ablation → measurement."""
    calls: dict[str, float] = field(default_factory=dict)
    """API calls with speculation, by its form."""


def run(plan: Plan, serving: Serving, folder: Path, display: Display) -> Ran:
    """Raises BenchmarkError, ChildFailed, PromptError."""
    maker = PromptMaker.of_model(serving.model)
    ran = Ran({workload.name: {} for workload in plan.workloads})
    for ablation in plan.ablations:
        display.phase(f"{ablation.title}: starting a server")
        with serving.start(ablation, folder) as url, Recorded(url) as backend:
            for workload in plan.workloads:
                display.phase(f"{ablation.title}: {workload.title}")
                ran.table[workload.name][ablation.name] = _measure(plan, workload, ablation, backend, maker)
            if plan.extraction and ablation is FULL:
                display.phase(f"{ablation.title}: three fields from a black box")
                ran.calls = call_ratios(url, serving.model.name, plan.seed)
    return ran


def _measure(plan: Plan, workload: Workload, ablation: Ablation, backend: Recorded, maker: PromptMaker) -> Measured:
    """A short program of the same kind first warms everything but the cache: grammars, kernels, connections."""
    _run(plan.batch(workload, maker, "warm-up", 1, plan.warm_up), ablation, backend)
    batch = plan.batch(workload, maker, "batch")
    duration_s = _timed([batch], ablation, backend)
    asked = backend.take()
    found = compare(asked, maker.tokenizer) if ablation is FULL else hits(asked)
    latency_s = None
    if ablation in (FULL, NONE):
        alone = plan.batch(workload, maker, "alone", ALONE)
        one_by_one = [Batch(alone.program, [arguments]) for arguments in alone.arguments]
        latency_s = _timed(one_by_one, ablation, backend) / len(one_by_one)
    return Measured(len(batch.arguments), duration_s, found, latency_s)


def _timed(batches: Sequence[Batch], ablation: Ablation, backend: Recorded) -> float:
    """Seconds of all, one after another, from an empty cache."""
    backend.flush_cache()
    backend.take()
    started = time.perf_counter()
    for batch in batches:
        _run(batch, ablation, backend)
    return time.perf_counter() - started


def _run(batch: Batch, ablation: Ablation, backend: Recorded) -> None:
    """Raises BenchmarkError if a program failed."""
    states = batch.program.run_batch(
        batch.arguments,
        num_threads=AT_ONCE,
        backend=backend,
        hints=ablation.hints,
        parallel=ablation.parallel,
        order=ablation.order,
        temperature=0.0,
        generator_style=True,
    )
    for state in states:
        if (failure := state.error()) is not None:
            raise BenchmarkError(f"a program failed: {failure}")
