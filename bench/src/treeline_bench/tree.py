"""Benchmark `tree`: the picker's byte radix tree alone, without sockets.

Method. The room `epp/` measures its own tree in its own process (`epp/benchmarks/tree.py`, which says how); this
wraps what it prints. Matching is timed on one core over many prompts; ingestion goes from encoded KV-event payloads
to marks in the tree; memory is what the tree adds per block beyond the text that its edges hold.
"""

from __future__ import annotations

from treeline_bench import scripts
from treeline_bench.context import ROOT, Benchmark, Context
from treeline_bench.metrics import row
from treeline_bench.results import Row

WHAT = "the tree's benchmark"
SCRIPT = ROOT / "epp" / "benchmarks" / "tree.py"
METRICS = (
    "tree.match_us.2700",
    "tree.match_us.100k",
    "tree.ingest_blocks_s",
    "tree.remove_blocks_s",
    "tree.bytes_per_block",
)
# A twentieth of the usual number of sequences.
QUICK = ("--sequences", "100")
LIMIT_S = 600.0


def parse(printed: str) -> dict[str, float]:
    """Values by metric from what the script prints. Raises BenchmarkError when one is missing."""
    return scripts.parse(printed, METRICS, WHAT)


def run(context: Context) -> list[Row]:
    context.display.phase("tree: matching, ingestion, memory")
    values = parse(scripts.printed(SCRIPT, QUICK if context.quick else (), WHAT, LIMIT_S))
    return [row(name, values[name]) for name in METRICS]


BENCHMARK = Benchmark(
    "tree", "The byte radix tree", "match, ingest, bytes per block of the picker's tree (half a minute)", run
)
