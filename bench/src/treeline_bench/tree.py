"""Benchmark `tree`: the picker's byte radix tree alone, without sockets.

Method. The room `epp/` measures its own tree in its own process (`epp/benchmarks/tree.py`, which says how); this
wraps what it prints. Matching is timed on one core over many prompts; ingestion goes from encoded KV-event payloads
to marks in the tree; memory is what the tree adds per block beyond the text that its edges hold.
"""

from __future__ import annotations

import subprocess
import sys

import msgspec

from treeline_bench.context import ROOT, Benchmark, BenchmarkError, Context
from treeline_bench.metrics import row
from treeline_bench.processes import before_exec
from treeline_bench.results import Row

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


class _Printed(msgspec.Struct):
    metric: str
    value: float


def parse(printed: str) -> dict[str, float]:
    """Values by metric from JSON: a list of rows, or a row a line. Raises BenchmarkError when one is missing."""
    try:
        if printed.lstrip().startswith("["):
            found = msgspec.json.decode(printed, type=list[_Printed])
        else:
            found = msgspec.json.Decoder(_Printed).decode_lines(printed)
    except msgspec.DecodeError as error:
        raise BenchmarkError(f"the tree's benchmark printed something else than rows: {error}") from error
    values = {each.metric: each.value for each in found}
    if missing := [name for name in METRICS if name not in values]:
        raise BenchmarkError(f"the tree's benchmark did not report {', '.join(missing)}")
    return values


def run(context: Context) -> list[Row]:
    if not SCRIPT.exists():
        raise BenchmarkError("epp/benchmarks/tree.py is not here: run this in a checkout of the repository")
    context.display.phase("tree: matching, ingestion, memory")
    argv = [sys.executable, str(SCRIPT), *(QUICK if context.quick else ())]
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=before_exec(None),
    )
    try:
        printed, said = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"the tree's benchmark took over {LIMIT_S:g} s") from None
    finally:
        process.kill()
        process.wait()
    if process.returncode != 0:
        raise BenchmarkError(f"the tree's benchmark exited with status {process.returncode}:\n{said[-2000:]}")
    values = parse(printed)
    return [row(name, values[name]) for name in METRICS]


BENCHMARK = Benchmark(
    "tree", "The byte radix tree", "match, ingest, bytes per block of the picker's tree (half a minute)", run
)
