"""Benchmark `fleet`: one picker and thousands of endpoints.

Method. The room `epp/` measures itself (`epp/benchmarks/pick.py` and `follow.py`, which say how): the CPU time of one
choice among 1,000 and 5,000 endpoints, and a picker's process that follows 2,000 publishers, which one other process
plays.
"""

from __future__ import annotations

from treeline_bench import scripts
from treeline_bench.context import ROOT, Benchmark, Context
from treeline_bench.metrics import row
from treeline_bench.results import Row

PICK = ROOT / "epp" / "benchmarks" / "pick.py"
FOLLOW = ROOT / "epp" / "benchmarks" / "follow.py"
PICKED = tuple(f"picker.{figure}.{count}" for count in (1000, 5000) for figure in ("pick_ms", "pick_p99_ms"))
FOLLOWED = tuple(
    f"picker.{figure}.2000" for figure in ("followed", "live_s", "events_s", "idle_cores", "files", "rss_mb")
)
LIMIT_S = 1500.0


def run(context: Context) -> list[Row]:
    display = context.display
    display.phase("fleet: choices among many endpoints")
    what = "the benchmark of picks"
    values = scripts.parse(
        scripts.printed(PICK, ("--picks", "50") if context.quick else (), what, LIMIT_S), PICKED, what
    )
    rows = [row(name, values[name]) for name in PICKED]
    if context.quick:
        return rows
    display.phase("fleet: 2,000 endpoints are followed")
    what = "the benchmark of following"
    values = scripts.parse(scripts.printed(FOLLOW, (), what, LIMIT_S), FOLLOWED, what)
    return [*rows, *(row(name, values[name]) for name in FOLLOWED)]


BENCHMARK = Benchmark(
    "fleet", "Many endpoints", "picks among thousands of endpoints, and following them (minutes)", run
)
