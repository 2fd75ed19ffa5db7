"""Benchmark `chaos`: what free requests feel of two hundred schemas at once, and of hostile ones.

Method. The room `runtime/` measures it on a real server (`runtime/benchmarks/chaos.py`, which says how), with the tiny
model.
"""

from __future__ import annotations

from treeline_bench import scripts
from treeline_bench.context import ROOT, Benchmark, Context
from treeline_bench.metrics import row
from treeline_bench.results import Row

WHAT = "the benchmark of hostile grammars"
SCRIPT = ROOT / "runtime" / "benchmarks" / "chaos.py"
LIMIT_S = 900.0
QUICK = ("--rounds=1", "--seconds=1", "--storm=20")
ALWAYS = ("chaos.gap.schemas_by_control", "chaos.total.hostile_by_control")


def run(context: Context) -> list[Row]:
    context.display.phase("chaos: free streams quiet, beside free requests, beside schemas, beside hostile ones")
    said = scripts.printed(SCRIPT, QUICK if context.quick else [], WHAT, LIMIT_S)
    return [row(name, value) for name, value in scripts.parse(said, ALWAYS, WHAT).items()]


BENCHMARK = Benchmark("chaos", "Hostile grammars", "what free requests feel of a storm of grammars (minutes)", run)
