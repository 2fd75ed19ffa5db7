"""Markdown from results: a page per benchmark, and the README's summary."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path

from treeline_bench.machine import this_machine, versions
from treeline_bench.metrics import HEADLINES, metric, missed
from treeline_bench.results import (
    Result,
    Row,
    number,
    provenance,
    table,
    versions_line,
    write_result,
    write_whole,
)

BEGIN = "<!-- bench:begin -->"
END = "<!-- bench:end -->"


class MarkersMissing(ValueError):
    """The text has no markers for the summary."""


def measured(benchmark: str, command: str, rows: Sequence[Row], more: Mapping[str, str] | None = None) -> Result:
    """A result of today on this machine. `more`: further versions by name."""
    today = datetime.date.today().isoformat()
    return Result(benchmark, today, this_machine(), versions() | dict(more or {}), command, list(rows))


def publish(result: Result, title: str, folder: Path) -> None:
    """Writes NAME.json, NAME.md and NAME.svg."""
    from treeline_bench.plots import plot  # drawing is slow to load

    write_result(result, folder)
    write_whole(folder / f"{result.benchmark}.md", page(result, title).encode())
    plot(result, folder / f"{result.benchmark}.svg")


def page(result: Result, title: str) -> str:
    """A benchmark's page: a table with meaning and reference of each figure."""
    lines = [
        [
            row.metric,
            number(row.value),
            row.unit,
            _expected(row),
            _ratio(row),
            metric(row.metric).source,
            meaning,
        ]
        for row in result.rows
        for meaning in [metric(row.metric).meaning]
    ]
    header = ["metric", "value", "unit", "compared with", "ratio", "source of the comparison", "meaning"]
    return "\n".join(
        [
            f"# {title}",
            "",
            provenance(result),
            "",
            table(header, lines),
            f"Versions: {versions_line(result.versions)}.",
            "",
        ]
    )


def summary(results: Sequence[Result]) -> str:
    """The README's table of headlines, and a sentence about the figures of all results that miss their bound."""
    by_name = {row.metric: (row, result) for result in results for row in result.rows}
    found = [by_name[name] for name in HEADLINES if name in by_name]
    lines = [
        [
            metric(row.metric).meaning,
            f"{number(row.value)} {row.unit}",
            _expected(row),
            result.date,
            f"`{result.command}`",
        ]
        for row, result in found
    ]
    return "\n".join([table(["what", "measured", "compared with", "on", "by"], lines), _missed_sentence(results), ""])


def missed_page(results: Sequence[Result]) -> str:
    """A page with every figure that misses its bound, the largest miss first."""
    rows = sorted(_missed(results), key=_distance, reverse=True)
    lines = [
        [f"`{row.metric}`", number(row.value), row.unit, _expected(row), metric(row.metric).meaning] for row in rows
    ]
    return "\n".join(
        [
            "# Figures that miss their bound",
            "",
            _counted(results),
            "",
            table(["metric", "value", "unit", "bound", "meaning"], lines),
        ]
    )


def _missed(results: Sequence[Result]) -> list[Row]:
    return [row for result in results for row in result.rows if missed(row)]


def _counted(results: Sequence[Result]) -> str:
    bounded = sum(missed(row) is not None for result in results for row in result.rows)
    return f"{len(_missed(results))} of {bounded} figures with a bound miss it."


def _missed_sentence(results: Sequence[Result]) -> str:
    furthest: dict[str, Row] = {}
    for result in results:
        for row in _missed([result]):
            furthest[result.benchmark] = max(furthest.get(result.benchmark, row), row, key=_distance)
    most = sorted(furthest.values(), key=_distance, reverse=True)[:3]
    named = ", ".join(
        f"{metric(row.metric).meaning} ({number(row.value)} {row.unit}, {_expected(row)})" for row in most
    )
    return f"{_counted(results)} The furthest of three benchmarks: {named}." if most else _counted(results)


def _distance(row: Row) -> float:
    """By how many times the figure misses its bound; more than 1 when it does."""
    assert isinstance(row.reference, float | int)
    shares = (row.value, row.reference) if metric(row.metric).better == "lower" else (row.reference, row.value)
    return shares[0] / shares[1] if shares[1] else float("inf")


def replace_between_markers(text: str, content: str, begin: str = BEGIN, end: str = END) -> str:
    """Replaces the text between the two markers by `content`. Raises MarkersMissing."""
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise MarkersMissing(f"there must be one {begin} and, after it, one {end}")
    return f"{before}{begin}\n{content.strip()}\n{end}{after}"


def _expected(row: Row) -> str:
    if row.reference is None:
        return "–"
    if isinstance(row.reference, str):
        return row.reference
    described = metric(row.metric)
    if described.beside:  # no bound: a neighbour
        return f"{number(row.reference)} ({described.beside})"
    return f"{'≤' if described.better == 'lower' else '≥'} {number(row.reference)}"


def _ratio(row: Row) -> str:
    return "–" if row.ratio is None else f"{row.ratio:.2f}"
