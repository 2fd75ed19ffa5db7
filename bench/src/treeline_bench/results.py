"""A benchmark's result: a JSON file, and a Markdown table made from it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec


class ResultError(ValueError):
    """A file is not a benchmark result; the message names it and the reason."""


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A measured number. `ratio` = value ÷ reference; both None without a reference."""

    metric: str
    value: float
    unit: str
    reference: float | str | None
    ratio: float | None


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The machine's size, nothing that identifies it."""

    cores: int
    cpu_model: str
    memory_gib: float
    os: str
    gpu: str = ""
    """The GPU's name; empty without a GPU."""

    def __str__(self) -> str:
        gpu = f"{self.gpu}, " if self.gpu else ""
        return f"{gpu}{self.cores} cores ({self.cpu_model}), {self.memory_gib:g} GiB, {self.os}"


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `bench/results/<benchmark>.json`. `date` is an ISO day; `versions`: component → version."""

    benchmark: str
    date: str
    machine: Machine
    versions: dict[str, str]
    command: str
    rows: list[Row]

    def row(self, metric: str) -> Row:
        """Raises KeyError when the benchmark did not report `metric`."""
        for row in self.rows:
            if row.metric == metric:
                return row
        raise KeyError(f"{self.benchmark} has no row {metric!r}")

    def value(self, metric: str) -> float:
        """Raises KeyError when the benchmark did not report `metric`."""
        return self.row(metric).value


def write_result(result: Result, folder: Path) -> Path:
    """Writes `<folder>/<benchmark>.json` atomically; returns its path."""
    text = msgspec.json.format(msgspec.json.encode(result), indent=2)
    return write_whole(folder / f"{result.benchmark}.json", text + b"\n")


def write_whole(path: Path, content: bytes) -> Path:
    """Writes by rename, so that an interrupted run leaves no partial file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    os.replace(partial, path)
    return path


def read_result(path: Path) -> Result:
    """Raises ResultError if the file is missing or not a result."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Result)
    except (OSError, msgspec.DecodeError) as error:
        raise ResultError(f"{path.name} is not a benchmark result: {error}") from error


def read_results(folder: Path, names: Sequence[str]) -> list[Result]:
    """The existing results of `names` in `folder`, in that order. Raises ResultError for a damaged one."""
    paths = [folder / f"{name}.json" for name in names]
    return [read_result(path) for path in paths if path.exists()]


def number(value: float) -> str:
    """Readable: three significant digits for small numbers, thousands separated for large ones."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if value == int(value):
        return f"{value:.0f}"
    return f"{value:.3g}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; cells are escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def provenance(result: Result) -> str:
    """One line: when, on what, with which command."""
    return f"Measured {result.date} on {result.machine} with `{result.command}`."


def versions_line(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
