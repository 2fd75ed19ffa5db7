"""The parts of dashboards: rows of panels, variables, and shared PromQL."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

PROCESS: Final = 'namespace=~"$namespace", pod=~"$pod"'
"""Selects the processes that are chosen above a dashboard."""

Kind = Literal["timeseries", "stat", "heatmap", "table"]


class Query(NamedTuple):
    """PromQL, and the name of its lines (with labels as Grafana has them, `{{label}}`), or of its column in a table.

    `unit` is a column's, where it is another than the panel's.
    """

    expr: str
    legend: str = ""
    unit: str = ""


class Panel(NamedTuple):
    """`unit` is one of Grafana's; `stacked` is for lines that add up; from the value `alarm` on a stat is red."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    text: str = ""
    stacked: bool = False
    kind: Kind = "timeseries"
    alarm: float | None = None


class Variable(NamedTuple):
    """A choice above a dashboard: the values that a label of a metric has. `regex` cuts the part out that is shown."""

    name: str
    title: str
    metric: str
    label: str
    regex: str = ""


class Board(NamedTuple):
    """A dashboard: its variables, and rows of panels by their titles."""

    uid: str
    title: str
    variables: tuple[Variable, ...]
    rows: dict[str, tuple[Panel, ...]]


def processes(presence: str) -> tuple[Variable, Variable]:
    """The choice of namespaces and pods. `presence` is a metric that each of the board's processes has."""
    pods = f'{presence}{{namespace=~"$namespace"}}'
    return Variable("namespace", "Namespace", presence, "namespace"), Variable("pod", "Pod", pods, "pod")


def rate(metric: str, by: str = "", selected: str = PROCESS) -> str:
    """A counter's growth a second, summed."""
    summed = f"sum by ({by}) " if by else "sum"
    return f"{summed}(rate({metric}{{{selected}}}[$__rate_interval]))"


def quantile(share: float, histogram: str, by: str = "", selected: str = PROCESS) -> str:
    """A quantile of a histogram."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share:g}, {rate(f'{histogram}_bucket', labels, selected)})"


def quantiles(
    histogram: str, by: str = "", shown: tuple[float, ...] = (0.5, 0.9, 0.99), selected: str = PROCESS
) -> tuple[Query, ...]:
    """Some quantiles of a histogram, each a line."""
    named = f" {{{{{by}}}}}" if by else ""
    return tuple(Query(quantile(q, histogram, by, selected), f"p{100 * q:g}{named}") for q in shown)


def heatmap(title: str, unit: str, histogram: str, text: str = "", selected: str = PROCESS) -> Panel:
    """A heatmap of a histogram's values over time."""
    buckets = f"sum by (le) (increase({histogram}_bucket{{{selected}}}[$__rate_interval]))"
    return Panel(title, unit, (Query(buckets, "{{le}}"),), text, kind="heatmap")


def stat(title: str, unit: str, expr: str, text: str = "", alarm: float | None = None) -> Panel:
    """One number, red from `alarm` on."""
    return Panel(title, unit, (Query(expr),), text, kind="stat", alarm=alarm)


def share(part: str, whole: str, by: str = "", selected: str = PROCESS) -> str:
    """The share of `part` in `whole`; no value while `whole` does not grow."""
    return f"{rate(part, by, selected)} / ({rate(whole, by, selected)} > 0)"
