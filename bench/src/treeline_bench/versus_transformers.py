"""Benchmark `cpu`: the engine on a CPU beside `transformers.generate`, the tiny model, in one run.

Method. The room `runtime/` runs both in turn (`runtime/benchmarks/versus_transformers.py`, which says how). It needs
the package transformers, which `make setup` installs.
"""

from __future__ import annotations

from treeline_bench import scripts
from treeline_bench.context import ROOT, Benchmark, Context
from treeline_bench.metrics import row
from treeline_bench.results import Row

WHAT = "the comparison with transformers"
SCRIPT = ROOT / "runtime" / "benchmarks" / "versus_transformers.py"
LIMIT_S = 1800.0
ALWAYS = ("cpu.vs_transformers.b1", "cpu.vs_transformers.b8", "cpu.vs_transformers.mixed.b8")


def run(context: Context) -> list[Row]:
    context.display.phase("cpu: ours and transformers in turn")
    args = ["--model", str(context.model), *(["--quick"] if context.quick else [])]
    said = scripts.printed(SCRIPT, args, WHAT, LIMIT_S)
    return [row(name, value) for name, value in scripts.parse(said, ALWAYS, WHAT).items()]


BENCHMARK = Benchmark("cpu", "The engine on a CPU", "beside transformers.generate, the tiny model (minutes)", run)
