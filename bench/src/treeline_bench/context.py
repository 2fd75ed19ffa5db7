"""The input and the description of benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from treeline_bench.results import Row

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "models" / "tiny"


class BenchmarkError(RuntimeError):
    """A benchmark cannot run, or its figures would be wrong; the message says why."""


class ClientFailed(RuntimeError):
    """A load process failed; the message ends with its output."""


class Display(Protocol):
    """Shows a benchmark's progress."""

    def phase(self, text: str, total: int | None = None) -> None:
        """Begins a step, of `total` parts if known."""

    def done(self, parts: int, note: str = "") -> None:
        """Shows the number of finished parts of the step, and a note."""


@dataclass(frozen=True)
class Context:
    """`folder`: scratch space, removed afterwards; `quick`: a few seconds instead of good figures."""

    display: Display
    folder: Path
    quick: bool = False
    model: Path = MODEL


@dataclass(frozen=True)
class Benchmark:
    """`run` returns the rows. It raises BenchmarkError, ChildFailed or ClientFailed, and leaves no process behind."""

    name: str
    title: str
    summary: str
    run: Callable[[Context], list[Row]]
    only_by_name: bool = False
    """Whether `make bench` leaves it out, since few machines can run it."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions, by name, of programs that it starts and this environment lacks."""
    command: str = ""
    """The command-line words, if more than the name."""
