"""What a workload is: a program of the language, and what it is run on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from treeline_bench.programs.data import Data


@dataclass(frozen=True)
class Batch:
    """A program, and the arguments of each time that it is run."""

    program: Any
    arguments: list[dict[str, Any]]


@dataclass(frozen=True)
class Workload:
    name: str
    title: str
    shape: str
    """In words: prompts, answers and branches before scaling, in tokens."""
    make: Callable[[Data, int], Batch]
    """(data, how many programs) → what is run; the same for data of the same seed."""
    programs: int
    """By default."""
