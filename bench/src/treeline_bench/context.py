"""What every benchmark is given, and how one is described."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from treeline_bench.results import Row

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "models" / "tiny"


class BenchmarkError(RuntimeError):
    """A benchmark could not be run, or what it measured would be wrong; the message says why."""


class ClientFailed(RuntimeError):
    """A load process could not carry out its order; the message ends with what it said."""


class Display(Protocol):
    """Where a benchmark says how far it is."""

    def phase(self, text: str, total: int | None = None) -> None:
        """A new step begins, of `total` parts if that is known."""

    def done(self, parts: int, note: str = "") -> None:
        """So many parts of the step are done; `note` says how it goes."""


@dataclass(frozen=True)
class Context:
    """`folder` is scratch space that is removed afterwards; `quick` asks for a few seconds instead of good figures."""

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
    """It needs what few machines have, so it is not one of all."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of what it starts and this environment has not, by name."""
    command: str = ""
    """Its words on the command line, where they are more than its name."""
