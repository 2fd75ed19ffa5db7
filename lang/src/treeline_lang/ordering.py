"""In which order the programs of a batch are started, and what is cached before the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from treeline_lang.executor import Run

if TYPE_CHECKING:
    from treeline_lang.program import Function


@dataclass(frozen=True, slots=True)
class Plan:
    order: Sequence[int]
    """Numbers of the items."""

    def warm(self, run: Run) -> None:
        """Sends the text that all begin with."""


def plan_batch(program: Function, arguments: Sequence[Mapping[str, Any]], run: Run) -> Plan:
    return Plan(range(len(arguments)))
