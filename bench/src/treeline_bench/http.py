"""Benchmark `http`: what HTTP costs a runtime.

Method. The room `runtime/` asks a server of its own, whose scheduler has no model, for small completions
(`runtime/benchmarks/small_completions.py`, which says how, and which compares two servers in a paired run); this wraps
what it prints.
"""

from __future__ import annotations

from treeline_bench import scripts
from treeline_bench.context import ROOT, Benchmark, Context
from treeline_bench.metrics import row
from treeline_bench.results import Row

WHAT = "the benchmark of HTTP"
SCRIPT = ROOT / "runtime" / "benchmarks" / "small_completions.py"
METRICS = ("http.requests_s", "http.cpu_us")
QUICK = ("--requests", "640", "--rounds", "1")
LIMIT_S = 600.0


def run(context: Context) -> list[Row]:
    context.display.phase("http: small completions")
    args = ["--model", str(context.model), *(QUICK if context.quick else ())]
    values = scripts.parse(scripts.printed(SCRIPT, args, WHAT, LIMIT_S), METRICS, WHAT)
    return [row(name, values[name]) for name in METRICS]


BENCHMARK = Benchmark(
    "http", "HTTP of a runtime", "small completions against a scheduler without a model (a minute)", run
)
