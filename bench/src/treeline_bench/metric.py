"""What a metric is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """What a figure means. `reference` is None where it is measured beside the value; `source`: where it is from."""

    unit: str
    meaning: str
    better: Literal["lower", "higher"]
    reference: float | None = None
    source: str = ""
    beside: str = ""
    """What was measured beside it, in a word."""
    headline: bool = True
    """Shown in the README's summary."""


detail = partial(Metric, headline=False)
"""A metric that the README's summary leaves out."""

EXPECTED = "expected on 2 cores"
BOUND = "the bound that was set"
