"""Benchmark `radix`: what the runtime's radix cache costs, and how much it finds of what could be found.

Method. The room `runtime/` measures both (`runtime/benchmarks/radix.py`, which says how).
"""

from __future__ import annotations

from treeline_bench import scripts
from treeline_bench.context import ROOT, Benchmark, Context
from treeline_bench.metrics import row
from treeline_bench.results import Row

WHAT = "the benchmark of the radix cache"
SCRIPT = ROOT / "runtime" / "benchmarks" / "radix.py"
LIMIT_S = 1800.0


def run(context: Context) -> list[Row]:
    context.display.phase("radix: share of time, hit rates")
    said = scripts.printed(SCRIPT, ["--quick"] if context.quick else [], WHAT, LIMIT_S)
    return [row(name, value) for name, value in scripts.parse(said, ("radix.hit_vs_optimal",), WHAT).items()]


BENCHMARK = Benchmark("radix", "The radix cache", "its share of the time, and hit rates beside the best (minutes)", run)
