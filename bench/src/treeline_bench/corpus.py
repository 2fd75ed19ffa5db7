"""`treeline bench structured --corpus DIR`: which schemas of the real world are taken, and whether what is, is held.

Method. The room `runtime/` tries each of them (`runtime/benchmarks/schema_corpus.py`, which says how).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from treeline_bench import scripts
from treeline_bench.colours import OURS
from treeline_bench.context import ROOT, Benchmark, Context
from treeline_bench.metrics import row
from treeline_bench.results import Result, Row

NAME = "structured-corpus"
WHAT = "the benchmark of schemas"
SCRIPT = ROOT / "runtime" / "benchmarks" / "schema_corpus.py"
LIMIT_S = 4 * 3600.0
ALWAYS = ("corpus.outputs", "corpus.violations", "corpus.wrongly_taken", "corpus.compile_ms.p99")
_QUICK = 100


def benchmark(folder: Path, every: int) -> Benchmark:
    """Tries each Nth schema (`every`) of a folder that `make corpora` made. Raises ValueError for any other folder."""
    if not any(folder.glob("data/*/*.json")):
        raise ValueError(f"--corpus {folder}: there are no schemas; `make corpora` makes .cache/jsonschemabench")
    command = f"structured --corpus .cache/{folder.name} --every {every}"
    title = "Schemas of the real world"
    return Benchmark(NAME, title, "which are taken, and held", partial(_run, folder, every), command=command)


def _run(folder: Path, every: int, context: Context) -> list[Row]:
    context.display.phase("structured: schemas of a corpus")
    each = str(every * (_QUICK if context.quick else 1))
    said = scripts.printed(SCRIPT, [str(folder), "--every", each], WHAT, LIMIT_S)
    return [row(name, value) for name, value in scripts.parse(said, ALWAYS, WHAT).items()]


def draw(result: Result) -> Figure:
    name = "corpus.accepted."
    shares = {row.metric.removeprefix(name): row.value for row in result.rows if row.metric.startswith(name)}
    figure = Figure(figsize=(8, 7), layout="constrained")
    broken = result.value("corpus.violations")
    figure.suptitle(f"Schemas of the real world that are taken; {broken:g} outputs break one")
    axes = figure.subplots()
    bars = axes.barh(list(shares), list(shares.values()), color=OURS)
    axes.bar_label(bars, fmt="%.2f", padding=4)
    axes.invert_yaxis()
    axes.set(xlabel="share", xlim=(0, 1.1))
    return figure
