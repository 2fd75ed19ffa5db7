"""Benchmark `scrape`: what it costs a picker to read the load of engines that push none.

Method. The room `epp/` measures itself (`epp/benchmarks/scrape.py`, which says how): the CPU time of a process that
reads the metrics pages of 100 vLLMs, 100 KB each, which one other process plays.
"""

from __future__ import annotations

from treeline_bench import scripts
from treeline_bench.context import ROOT, Benchmark, Context
from treeline_bench.metrics import row
from treeline_bench.results import Row

SCRAPE = ROOT / "epp" / "benchmarks" / "scrape.py"
METRICS = tuple(f"scrape.{figure}.100" for figure in ("cores", "read_us", "reads_s"))
LIMIT_S = 120.0


def run(context: Context) -> list[Row]:
    context.display.phase("scrape: a hundred engines are read")
    what = "the benchmark of reading metrics"
    seconds = "2" if context.quick else "15"
    values = scripts.parse(scripts.printed(SCRAPE, ("--seconds", seconds), what, LIMIT_S), METRICS, what)
    return [row(name, values[name]) for name in METRICS]


BENCHMARK = Benchmark("scrape", "Engines that push no load", "reading the metrics of a hundred engines", run)
