"""Benchmark `tree`: the picker's byte radix tree, and how KV events get into it.

Method. The room `epp/` measures itself in processes of its own, whose scripts say how; this wraps what they print.
`epp/benchmarks/tree.py`: matching is timed on one core over many prompts; ingestion goes from encoded KV-event payloads
to marks in the tree; memory is what the tree adds per block beyond the text that its edges hold, and in another run the
resident memory of a picker's process with the full caches of 100 endpoints. Where `ai-dynamo-runtime` is installed, the
same sequences are looked up in Dynamo's tree, too. `epp/benchmarks/events.py`: 8 and 100 engines publish over ZMQ, and
the picker's own subscriptions take it in.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from treeline_bench import scripts
from treeline_bench.context import ROOT, Benchmark, Context
from treeline_bench.metrics import row
from treeline_bench.results import Row

WHAT = "the tree's benchmark"
SCRIPT = ROOT / "epp" / "benchmarks" / "tree.py"
EVENTS = ROOT / "epp" / "benchmarks" / "events.py"
METRICS = (
    "tree.match_us.2700",
    "tree.match_us.100k",
    "tree.ingest_blocks_s",
    "tree.remove_blocks_s",
    "tree.bytes_per_block",
)
RESIDENT = ("tree.rss_mb.100x30k",)
BESIDE = ("tree.vs_dynamo.lookup",)
ROUTABLE = tuple(f"tree.event_to_routable_ms.{share}.{count}" for count in (8, 100) for share in ("p50", "p99"))
# A twentieth of the usual number of sequences.
QUICK = ("--sequences", "100")
LIMIT_S = 600.0


def parse(printed: str, metrics: Sequence[str] = METRICS) -> dict[str, float]:
    """Values by metric from what a script prints. Raises BenchmarkError when one is missing."""
    return scripts.parse(printed, metrics, WHAT)


def run(context: Context) -> list[Row]:
    display, quick = context.display, QUICK if context.quick else ()
    display.phase("tree: matching, ingestion, memory")
    values = parse(scripts.printed(SCRIPT, quick, WHAT, LIMIT_S))
    if find_spec("dynamo") is None:
        display.phase("tree: not beside Dynamo's, since ai-dynamo-runtime is not installed")
    else:
        display.phase("tree: lookups beside Dynamo's")
        values |= parse(scripts.printed(SCRIPT, ("--versus-dynamo", *quick), WHAT, LIMIT_S), BESIDE)
    display.phase("tree: from an engine's publishing to the tree")
    seconds = ("--seconds", "2") if context.quick else ()
    values |= parse(scripts.printed(EVENTS, seconds, WHAT, LIMIT_S), ROUTABLE)
    if not context.quick:
        display.phase("tree: memory with 100 endpoints")
        values |= parse(scripts.printed(SCRIPT, ("--full",), WHAT, LIMIT_S), RESIDENT)
    return [row(name, values[name]) for name in (*METRICS, *RESIDENT, *BESIDE, *ROUTABLE) if name in values]


BENCHMARK = Benchmark(
    "tree",
    "The byte radix tree",
    "match, ingest, memory of the picker's tree, events to routable (two minutes)",
    run,
)
