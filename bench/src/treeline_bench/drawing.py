"""What the plots are made of: bars with their values, lines of reference, the machine's size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from treeline_bench.colours import REFERENCE
from treeline_bench.results import Result, Row, number

HALF_BAR = 0.31
# Readable also where a reference line passes behind it.
LABEL: dict[str, Any] = {
    "padding": 4,
    "fontweight": "bold",
    "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1.5},
}


def new_figure(title: str, panels: int, note: str) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(4.3 * panels, 4.4), layout="constrained")
    figure.suptitle(title)
    figure.supxlabel(note, fontsize=9, color="#555555")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    return figure, list(axes)


def draw_bars(axes: Axes, labels: Sequence[str], values: Sequence[float], colours: Sequence[str]) -> None:
    bars = axes.bar(labels, values, color=colours, width=2 * HALF_BAR)
    axes.bar_label(bars, labels=[number(value) for value in values], **LABEL)
    axes.margins(y=0.25)


def draw_line(axes: Axes, height: float, label: str, bars: int, first: int = 0) -> None:
    """A reference line across the bars from `first` to before `bars`: those that it is about."""
    axes.hlines(
        height,
        first - HALF_BAR,
        bars - 1 + HALF_BAR,
        color=REFERENCE,
        linestyle="--",
        linewidth=1.6,
        label=label,
    )
    axes.legend(loc="upper right", frameon=False, fontsize=9)
    axes.set_ylim(top=max(axes.get_ylim()[1], height * 1.2))


def size_of(result: Result) -> str:
    return f"{result.machine.cores} cores, {result.machine.memory_gib:g} GiB"


def draw_expected(axes: Axes, row: Row, label: str, bars: int = 1, first: int = 0) -> None:
    if isinstance(row.reference, float | int):
        draw_line(axes, row.reference, label, bars, first)
