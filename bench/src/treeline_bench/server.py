"""Benchmark `server`: what HTTP, text and processes add to the engine, and what the GPU waits for meanwhile.

Method. The room `runtime/` runs the same 256 requests offline and through its server, and records 64 streams with the
profiler (`runtime/benchmarks/server.py`, which says how); this runs it for the shapes of benchmark `engine`.
"""

from __future__ import annotations

from treeline_bench import engine, scripts
from treeline_bench.context import ROOT, Benchmark, Context
from treeline_bench.metrics import row
from treeline_bench.results import Row

WHAT = "the benchmark of the server"
SCRIPT = ROOT / "runtime" / "benchmarks" / "server.py"
LIMIT_S = 1800.0
BOUNDS = {"server_over_offline": 0.95, "start.warm_s": 12.0, "overlap.idle_share": 0.03}
"""On a GPU that has the machine's cores beside it."""


def run(context: Context) -> list[Row]:
    rows = []
    for shape in engine.shapes():
        context.display.phase(f"server: {shape}")
        args = ["--shape", shape, *(["--quick"] if context.quick or shape == "tiny" else [])]
        values = scripts.parse(scripts.printed(SCRIPT, args, WHAT, LIMIT_S), (f"server_over_offline.{shape}",), WHAT)
        bounds = BOUNDS if engine.has_cuda() else {}
        rows += [row(name, value, bounds.get(name.rpartition(".")[0])) for name, value in values.items()]
    return rows


BENCHMARK = Benchmark("server", "The server", "the same requests offline and through HTTP, idle GPU, start", run)
