"""Benchmark `lang-client`: what the language's client computes for a program, by what SGLang's does.

Method. The room `lang/` measures itself (`lang/benchmarks/client.py`, which says how): CPU seconds of two processes
that take turns, on a server that answers at once. SGLang's language is what `make engine-wheels` fetched.
"""

from __future__ import annotations

from treeline_bench import scripts
from treeline_bench.context import ROOT, Benchmark, Context
from treeline_bench.metrics import row
from treeline_bench.results import Row

CLIENT = ROOT / "lang" / "benchmarks" / "client.py"
METRICS = tuple(
    f"lang.{figure}.{name}" for figure in ("vs_sglang", "cpu_ms.ours", "cpu_ms.theirs") for name in ("call", "fork4")
)
LIMIT_S = 300.0


def run(context: Context) -> list[Row]:
    context.display.phase("lang-client: programs of one call, and of a fork of four")
    what = "the benchmark of the language's client (without `make engine-wheels` it has nothing to compare with)"
    args = ("--rounds", "2", "--runs", "20") if context.quick else ()
    values = scripts.parse(scripts.printed(CLIENT, args, what, LIMIT_S), METRICS, what)
    return [row(name, values[name]) for name in METRICS]


BENCHMARK = Benchmark(
    "lang-client", "The language's client", "CPU time of a program, by SGLang's (half a minute)", run, only_by_name=True
)
