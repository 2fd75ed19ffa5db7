"""Benchmark `cpu`: the engine on a CPU beside `transformers.generate`, the tiny model, in one run.

Method. With one thread and with two the room `runtime/` runs both in turn (`runtime/benchmarks/versus_transformers.py`,
which says how). It needs the package transformers, which `make setup` installs.
"""

from __future__ import annotations

from treeline_bench import scripts
from treeline_bench.context import ROOT, Benchmark, Context
from treeline_bench.metrics import row
from treeline_bench.results import Row

WHAT = "the comparison with transformers"
SCRIPT = ROOT / "runtime" / "benchmarks" / "versus_transformers.py"
LIMIT_S = 1800.0
THREADS = (1, 2)
ALWAYS = ("b1", "b8", "mixed.b8", "prefill.4096")
"""Compared in every run, with each number of threads."""


def run(context: Context) -> list[Row]:
    rows = []
    for threads in THREADS:
        context.display.phase(f"cpu: ours and transformers in turn, {threads} threads")
        args = ["--model", str(context.model), "--threads", str(threads), *(["--quick"] if context.quick else [])]
        said = scripts.printed(SCRIPT, args, WHAT, LIMIT_S)
        wanted = [f"cpu.vs_transformers.t{threads}.{name}" for name in ALWAYS]
        rows += [row(name, value) for name, value in scripts.parse(said, wanted, WHAT).items()]
    return rows


BENCHMARK = Benchmark("cpu", "The engine on a CPU", "beside transformers.generate, the tiny model (minutes)", run)
