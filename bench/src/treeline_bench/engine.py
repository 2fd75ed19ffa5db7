"""Benchmark `engine`: decode steps, prompts and a batch of requests in one process, beside what the device could do.

Method. The room `runtime/` measures its engine (`runtime/benchmarks/engine.py`, which says how); this runs it for the
shape of Llama-3.1-8B and of Qwen3-0.6B, with random weights, where there is a CUDA device, and for a tiny shape where
there is none.
"""

from __future__ import annotations

from treeline_bench import scripts
from treeline_bench.context import ROOT, Benchmark, BenchmarkError, Context
from treeline_bench.metrics import row
from treeline_bench.results import Row

WHAT = "the benchmark of the engine"
SCRIPT = ROOT / "runtime" / "benchmarks" / "engine.py"
LIMIT_S = 900.0


def run(context: Context) -> list[Row]:
    rows = []
    for shape in shapes():
        context.display.phase(f"engine: {shape}")
        args = ["--shape", shape, *(["--quick"] if context.quick else [])]
        rows += _rows(scripts.parse(scripts.printed(SCRIPT, args, WHAT, LIMIT_S), (f"start.{shape}",), WHAT))
    return rows


def shapes() -> tuple[str, ...]:
    """What is measured here."""
    return ("llama8b", "qwen3_0_6b") if has_cuda() else ("tiny",)


def has_cuda() -> bool:
    """Whether torch would use a GPU: a driver alone does not say so."""
    try:
        import torch
    except ImportError:
        raise BenchmarkError("torch is not installed here") from None
    return torch.cuda.is_available()


def _rows(values: dict[str, float]) -> list[Row]:
    """Each figure with its floor, if there is one."""
    figures = {name: value for name, value in values.items() if not name.startswith("floor.")}
    return [row(f"engine.{name}", value, values.get(f"floor.{name}")) for name, value in figures.items()]


BENCHMARK = Benchmark("engine", "The engine", "decode, prompts and a batch without HTTP, on a GPU if there is one", run)
