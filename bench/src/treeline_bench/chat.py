"""Benchmark `chat`: rendering a chat template, without sockets.

Method. The room `runtime/` renders in a process of its own (`runtime/benchmarks/chat.py`, which says how); this wraps
what it prints: a plain chat of 4 KB as the picker renders it, inline, and as a runtime has it rendered by a worker.
"""

from __future__ import annotations

from treeline_bench import scripts
from treeline_bench.context import ROOT, Benchmark, Context
from treeline_bench.metrics import row
from treeline_bench.results import Row

WHAT = "the benchmark of chat templates"
SCRIPT = ROOT / "runtime" / "benchmarks" / "chat.py"
METRICS = ("chat.render_us.4k", "chat.worker_us.4k")
QUICK = ("--count", "500")
LIMIT_S = 600.0


def run(context: Context) -> list[Row]:
    context.display.phase("chat: rendering a template")
    values = scripts.parse(scripts.printed(SCRIPT, QUICK if context.quick else (), WHAT, LIMIT_S), METRICS, WHAT)
    return [row(name, values[name]) for name in METRICS]


BENCHMARK = Benchmark("chat", "Chat templates", "rendering a plain chat of 4 KB, inline and by a worker (seconds)", run)
