"""What dashboards are made of: rows of panels, and the PromQL that they share."""

from __future__ import annotations

from typing import Final, NamedTuple

SELECTED: Final = 'namespace=~"$namespace"'
HERE: Final = f"{{{SELECTED}}}"
"""What a dashboard looks at: the namespaces that are chosen above it."""


class Query(NamedTuple):
    """PromQL, and the name of its lines (with labels as Grafana has them, `{{label}}`)."""

    expr: str
    legend: str = ""


class Panel(NamedTuple):
    """A graph over time. `unit` is one of Grafana's; `stacked` for what adds up."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    text: str = ""
    stacked: bool = False


class Board(NamedTuple):
    """A dashboard: rows of panels by their titles. `presence` is a metric that each of its processes has."""

    uid: str
    title: str
    presence: str
    rows: dict[str, tuple[Panel, ...]]


def rate(metric: str, by: str = "", selected: str = SELECTED) -> str:
    """A counter's growth a second, summed."""
    summed = f"sum by ({by}) " if by else "sum"
    return f"{summed}(rate({metric}{{{selected}}}[$__rate_interval]))"


def quantiles(
    histogram: str, by: str = "", shown: tuple[float, ...] = (0.5, 0.9, 0.99), selected: str = SELECTED
) -> tuple[Query, ...]:
    """Some quantiles of a histogram, each a line."""
    labels, named = (f"le, {by}", f" {{{{{by}}}}}") if by else ("le", "")
    buckets = rate(f"{histogram}_bucket", labels, selected)
    return tuple(Query(f"histogram_quantile({q:g}, {buckets})", f"p{100 * q:g}{named}") for q in shown)


def share(part: str, whole: str, by: str = "") -> str:
    """Of what went on meanwhile; nothing went on: no value."""
    return f"{rate(part, by)} / ({rate(whole, by)} > 0)"
