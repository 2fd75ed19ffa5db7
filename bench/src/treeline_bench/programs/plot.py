"""The plot of `treeline bench programs`."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from treeline_bench.colours import OTHER, OURS, REFERENCE
from treeline_bench.programs.ablations import ABLATIONS, FULL
from treeline_bench.programs.figures import geomean
from treeline_bench.programs.workloads import WORKLOADS
from treeline_bench.results import Result, number


def draw(result: Result) -> Figure:
    """Of a whole run: what is gained, what is found, and what each part is worth."""
    times = result.value("programs.throughput_full_over_none.geomean")
    least = result.value("programs.hit_vs_optimal.min")
    figure = Figure(figsize=(15, 5.2), layout="constrained")
    figure.suptitle(f"Programs run {times:.1f}× as fast as without cache and parallelism, with {least:.0%} of all hits")
    size = f"{result.machine.gpu or f'{result.machine.cores} cores'}, {result.machine.memory_gib:g} GiB"
    figure.supxlabel(f"the workloads of SGLang's paper in synthetic texts; {size}", fontsize=9, color="#555555")
    gained, hit, parts = figure.subplots(1, 3)
    names = [name for name in WORKLOADS if _has(result, f"programs.throughput.{name}.{FULL.name}")]
    _bars(
        gained,
        [WORKLOADS[name].title for name in names],
        [_value(result, "throughput_full_over_none", n) for n in names],
    )
    gained.axvline(1, color=REFERENCE, linestyle="--", linewidth=1.6)
    gained.set(title="Throughput", xlabel="× that with neither cache nor parallelism")
    _hits(hit, result, names)
    _parts(parts, result, names)
    return figure


def _has(result: Result, metric: str) -> bool:
    return any(row.metric == metric for row in result.rows)


def _value(result: Result, what: str, tail: str) -> float:
    return result.value(f"programs.{what}.{tail}")


def _bars(axes: Axes, labels: list[str], values: list[float]) -> None:
    bars = axes.barh(labels, values, color=OURS, height=0.62)
    axes.bar_label(bars, labels=[number(value) for value in values], padding=4, fontweight="bold")
    axes.invert_yaxis()
    axes.margins(x=0.18)


def _hits(axes: Axes, result: Result, names: list[str]) -> None:
    rows = [result.row(f"programs.hit_rate.{name}.{FULL.name}") for name in names]
    places = range(len(names))
    axes.barh(places, [100 * row.value for row in rows], color=OURS, height=0.62, label="found")
    best = [100 * float(row.reference or 0) for row in rows]
    axes.plot(best, places, "|", color=REFERENCE, markersize=16, markeredgewidth=2, label="optimum")
    axes.set_yticks(places, [""] * len(names))
    axes.invert_yaxis()
    axes.set(title="Prompt tokens from the cache", xlabel="hit rate (%)", xlim=(0, 105))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, frameon=False, fontsize=9)


def _parts(axes: Axes, result: Result, names: list[str]) -> None:
    """Each ablation's throughput by that of everything, over all workloads."""
    shown = [a for a in ABLATIONS.values() if all(_has(result, f"programs.throughput.{n}.{a.name}") for n in names)]
    ratios = [
        geomean(
            [
                _value(result, "throughput", f"{n}.{a.name}") / _value(result, "throughput", f"{n}.{FULL.name}")
                for n in names
            ]
        )
        for a in shown
    ]
    bars = axes.barh([a.title for a in shown], ratios, height=0.62, color=[OURS if a is FULL else OTHER for a in shown])
    axes.bar_label(bars, labels=[f"{ratio:.2f}" for ratio in ratios], padding=4, fontweight="bold")
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set(title="What each part is worth", xlabel="× the throughput of everything")
