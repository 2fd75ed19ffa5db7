"""SVG plots of results: the same result gives the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib.figure import Figure

from treeline_bench.metrics import metric
from treeline_bench.results import Result, Row, number

OURS, REFERENCE = "#1b6e53", "#b5482a"
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "treeline",
    "svg.fonttype": "path",  # looks the same wherever it is shown
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.titleweight": "bold",
}


def plot(result: Result, path: Path) -> Path:
    """Draws the main figures of `result` into the SVG file `path`.

    Bars are multiples of the reference, larger is always better. Without references they are values, in the unit of the
    first.
    """
    rows = [row for row in result.rows if metric(row.metric).drawn] or result.rows
    compared = [row for row in rows if row.ratio]
    shown = compared or [row for row in rows if row.unit == rows[0].unit]
    values = [_times_as_good(row) for row in shown] if compared else [row.value for row in shown]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.0, 1.4 + 0.34 * len(shown)), layout="constrained")
        machine = result.machine
        size = f"{machine.gpu or f'{machine.cores} cores'}, {machine.memory_gib:g} GiB"
        figure.suptitle(f"{result.benchmark}: {result.date}, {size}")
        axes = figure.subplots()
        colours = [REFERENCE if compared and value < 1 else OURS for value in values]
        bars = axes.barh(range(len(shown)), values, color=colours, height=0.6)
        axes.set_yticks(range(len(shown)), [row.metric for row in shown])
        axes.bar_label(bars, labels=[f"{number(row.value)} {row.unit}" for row in shown], padding=4)
        axes.invert_yaxis()
        axes.margins(x=0.25)
        if compared:
            axes.axvline(1, color=REFERENCE, linestyle="--", linewidth=1.3)
        axes.set_xlabel("times as good as its reference" if compared else rows[0].unit)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    return path


def _times_as_good(row: Row) -> float:
    assert row.ratio
    return row.ratio if metric(row.metric).better == "higher" else 1 / row.ratio
