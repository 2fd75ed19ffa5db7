"""What a metric is, and words that several have in common."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """The meaning of a figure. `reference` is None if it is measured in the same run; `source`: its origin."""

    unit: str
    meaning: str
    better: Literal["lower", "higher"]
    reference: float | None = None
    source: str = ""
    beside: str = ""
    """The reference measured in the same run, in a word."""
    drawn: bool = True
    """Whether plots show it."""


detail = partial(Metric, drawn=False)
"""A metric that plots leave out."""

BOUND = "the bound that was set"
PAPER = "SGLang's paper"
