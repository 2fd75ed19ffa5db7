"""Benchmark `tokenization`: one more turn of a conversation, without sockets.

Method. The room `runtime/` tokenizes in a process of its own (`runtime/benchmarks/tokenization.py`, which says how);
this wraps what it prints: how many times faster a conversation with a new turn is tokenized than as a whole.
"""

from __future__ import annotations

from treeline_bench import scripts
from treeline_bench.context import ROOT, Benchmark, Context
from treeline_bench.metrics import row
from treeline_bench.results import Row

WHAT = "the benchmark of tokenization"
SCRIPT = ROOT / "runtime" / "benchmarks" / "tokenization.py"
SIZES = ("4k", "40k", "400k")
QUICK_ROUNDS = "4"
LIMIT_S = 600.0


def run(context: Context) -> list[Row]:
    context.display.phase("tokenization: conversations that grow")
    args = ["--model", str(context.model), *(("--rounds", QUICK_ROUNDS) if context.quick else ())]
    metrics = [*(f"tokenization.speedup.{size}" for size in SIZES), "tokenization.turn_us"]
    values = scripts.parse(scripts.printed(SCRIPT, args, WHAT, LIMIT_S), metrics, WHAT)
    return [row(name, values[name]) for name in metrics]


BENCHMARK = Benchmark("tokenization", "Tokenization", "one more turn of a conversation, and the whole (seconds)", run)
