"""Benchmark `structured`: what grammars cost, and what is saved by not sampling what they force.

Method. The room `runtime/` measures both (`runtime/benchmarks/structured.py`, which says how), with the tiny model.
"""

from __future__ import annotations

from treeline_bench import scripts
from treeline_bench.context import ROOT, Benchmark, Context
from treeline_bench.metrics import row
from treeline_bench.results import Row

WHAT = "the benchmark of structured output"
SCRIPT = ROOT / "runtime" / "benchmarks" / "structured.py"
LIMIT_S = 1800.0
ALWAYS = ("structured.jump_forward_speedup", "structured.cached_schema_ttft_ms")


def run(context: Context) -> list[Row]:
    context.display.phase("structured: with and without jump-forward in turn")
    said = scripts.printed(SCRIPT, ["--quick"] if context.quick else [], WHAT, LIMIT_S)
    return [row(name, value) for name, value in scripts.parse(said, ALWAYS, WHAT).items()]


BENCHMARK = Benchmark("structured", "Structured output", "jump-forward, and what grammars cost (minutes)", run)
