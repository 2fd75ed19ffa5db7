"""The matrix: the outcome of each case for each picker, as Markdown and as JSON."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from treeline_bench.report import MarkersMissing, replace_between_markers
from treeline_bench.results import table, write_whole

from treeline_conformance.case import Case
from treeline_conformance.verdict import Level, Outcome, Verdict

BEGIN: Final = "<!-- conformance:begin -->"
END: Final = "<!-- conformance:end -->"
_PARTS: Final = ("cases", "pickers", "outcomes")
_MARKS: Final = {Verdict.PASS: "pass", Verdict.FAIL: "**fail**", Verdict.NOT_APPLICABLE: "–"}


@dataclass(frozen=True)
class Column:
    """One picker: its name, its command, and its outcomes by case."""

    name: str
    command: str
    outcomes: dict[str, Outcome]


def failed(column: Column, cases: Sequence[Case], *, gie15: bool) -> list[Case]:
    """Return the cases of level MUST that it fails."""
    return [one for one in cases if one.level is Level.MUST and _verdict(column, one, gie15=gie15) is Verdict.FAIL]


class ReportError(ValueError):
    """A file is no matrix, or has no markers for one; the message names it."""


class _Named(msgspec.Struct):
    name: str
    level: str = ""
    command: str = ""


class _Seen(msgspec.Struct):
    picker: str
    case: str
    verdict: str


class _Recorded(msgspec.Struct):
    """The members of a conformance.json that are read again."""

    cases: list[_Named]
    pickers: list[_Named]
    outcomes: list[_Seen]


def _verdict(column: Column, one: Case, *, gie15: bool) -> Verdict:
    outcome = column.outcomes.get(one.name)
    if outcome is None:
        return Verdict.NOT_APPLICABLE
    return outcome.gie15 if gie15 else outcome.verdict


def counts(columns: Sequence[Column], levels: Mapping[str, Level]) -> str:
    """Return the small table: the cases that each picker passes of those that apply, by level; `levels` by the cases'
    names.
    """
    lines = []
    for column in columns:
        cells = []
        for level in Level:
            found = Counter(one.verdict for name, one in column.outcomes.items() if levels[name] is level)
            cells.append(f"{found[Verdict.PASS]} of {found[Verdict.PASS] + found[Verdict.FAIL]}")
        lines.append([column.name, *cells])
    return table(["picker", *(level.value for level in Level)], lines)


def levels_of(cases: Sequence[Case]) -> dict[str, Level]:
    return {one.name: one.level for one in cases}


def quote(results: Path, target: Path) -> None:
    """Write the counts of a conformance.json between the markers in a file. Raises ReportError, OSError."""
    try:
        found = msgspec.json.decode(results.read_bytes(), type=_Recorded)
        levels = {one.name: Level(one.level) for one in found.cases}
        columns = [Column(picker.name, picker.command, {}) for picker in found.pickers]
        for column in columns:
            verdicts = {one.case: Verdict(one.verdict) for one in found.outcomes if one.picker == column.name}
            column.outcomes.update({name: Outcome(verdict, verdict) for name, verdict in verdicts.items()})
        text = counts(columns, levels)
    except (msgspec.MsgspecError, ValueError, KeyError) as error:
        raise ReportError(f"{results} is no matrix: {error}") from None
    try:
        written = replace_between_markers(target.read_text(), text, BEGIN, END)
    except MarkersMissing as error:
        raise ReportError(f"{target}: {error}") from None
    write_whole(target, written.encode())


def matrix(columns: Sequence[Column], cases: Sequence[Case]) -> str:
    """Return the table with a line for each case and a column for each picker; `†`: GIE 1.5's known behaviour."""
    lines = [
        [
            f"`{one.name}`",
            one.level.value,
            one.says,
            one.gie15,
            *(_cell(column, one) for column in columns),
        ]
        for one in cases
    ]
    return table(
        ["case", "level", "expected", "GIE 1.5, where it differs", *(column.name for column in columns)], lines
    )


def _cell(column: Column, one: Case) -> str:
    outcome = column.outcomes.get(one.name)
    if outcome is None:
        return ""
    known = outcome.verdict is Verdict.FAIL and outcome.gie15 is Verdict.PASS
    return _MARKS[outcome.verdict] + (" †" if known else "")


def page(columns: Sequence[Column], cases: Sequence[Case], command: str, versions: str) -> str:
    """Return the Markdown page: counts, matrix, and the reasons of failures."""
    parts = [
        "# Conformance of endpoint pickers",
        "",
        f"{datetime.date.today().isoformat()}, `{command}`. docs/conformance.md says what the cases are.",
        "",
        *(f"- {column.name}: `{column.command}`" for column in columns),
        "",
        counts(columns, levels_of(cases)),
        matrix(columns, cases),
        "–: not applicable (conformance.json says why). †: as the inference extension's picker 1.5 is known to do.",
        "",
    ]
    for column in columns:
        failures = [(one, column.outcomes[one.name]) for one in cases if one.name in column.outcomes]
        failures = [(one, outcome) for one, outcome in failures if outcome.verdict is Verdict.FAIL]
        parts += [f"## What fails on {column.name}", ""]
        parts += [f"- `{one.name}` ({one.level.value}): {_one_line(outcome.why)}" for one, outcome in failures] or [
            "Nothing."
        ]
        parts.append("")
    return "\n".join([*parts, f"Versions: {versions}.", ""])


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]


def as_json(columns: Sequence[Column], cases: Sequence[Case], command: str, versions: Mapping[str, str]) -> bytes:
    """Return everything as JSON, with the exchange of each failure; a line for each case, picker and outcome."""
    about = {"date": datetime.date.today().isoformat(), "command": command, "versions": dict(versions)}
    described = [{"name": c.name, "level": c.level.value, "says": c.says, "gie15": c.gie15} for c in cases]
    pickers = [{"name": column.name, "command": column.command} for column in columns]
    found = [
        {"picker": column.name, "case": name} | _outcome(outcome)
        for column in columns
        for name, outcome in column.outcomes.items()
    ]
    parts = [
        f'"about": {_json(about)}',
        *(_lines(*part) for part in zip(_PARTS, (described, pickers, found), strict=True)),
    ]
    return ("{\n" + ",\n".join(parts) + "\n}\n").encode()


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _lines(name: str, entries: Sequence[object]) -> str:
    return f'"{name}": [\n' + ",\n".join(_json(entry) for entry in entries) + "\n]"


def _outcome(outcome: Outcome) -> dict[str, Any]:
    found: dict[str, Any] = {"verdict": outcome.verdict.value, "gie15": outcome.gie15.value}
    if outcome.why:
        found["why"] = outcome.why
    if outcome.exchange:
        found["exchange"] = outcome.exchange
    return found


def write(folder: Path, markdown: str, document: bytes) -> None:
    """Write conformance.md and conformance.json. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "conformance.md", markdown.encode())
    write_whole(folder / "conformance.json", document)
