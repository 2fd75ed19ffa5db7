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
    """The README's table: headlines, all figures that miss their bound, and when and on what they were measured."""
    by_name = {row.metric: (row, result) for result in results for row in result.rows}
    found = [by_name[name] for name in HEADLINES if name in by_name]
    header = ["metric", "meaning", "measured", "expected", "ratio"]
    lines = [
        [
            f"`{row.metric}`",
            metric(row.metric).meaning,
            f"{number(row.value)} {row.unit}",
            _expected(row),
            _ratio(row),
        ]
        for row, _ in found
    ]
    quoted = [result for result in results if any(result is one for _, one in found)]
    paragraphs = [table(header, lines), *_missed(results), "\n".join(_measured(quoted)), ""]
    return "\n".join(paragraphs)


def _missed(results: Sequence[Result]) -> list[str]:
    """A sentence with all figures that miss their bound."""
    judged = [(row, missed(row)) for result in results for row in result.rows]
    bounded = [(row, misses) for row, misses in judged if misses is not None]
    named = [f"`{row.metric}` ({number(row.value)}, {_expected(row)})" for row, misses in bounded if misses]
    if not bounded:
        return []
    listed = f": {', '.join(named)}" if named else ""
    return [f"{len(named)} of {len(bounded)} figures that have a bound miss it{listed}.", ""]


def _measured(results: Sequence[Result]) -> list[str]:
    """A sentence for each day and machine, with the commands."""
    commands: dict[tuple[str, str], list[str]] = {}
    for result in results:
        commands.setdefault((result.date, str(result.machine)), []).append(f"`{result.command}`")
    return [f"Measured {date} on {machine}, with {', '.join(found)}." for (date, machine), found in commands.items()]


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
