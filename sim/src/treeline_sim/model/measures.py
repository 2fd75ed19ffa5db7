"""The measurements in an engine's load reports, as our runtime makes them."""

from __future__ import annotations

from bisect import bisect_left

from treeline_sim.model.text import Prompt

_FORGET = 0.9
"""Weight of the past after a step of mean length."""


class PrefillRate:
    """Tokens per second of steps that prefill, each weighed by its tokens (our `scheduler/reports.py`)."""

    def __init__(self) -> None:
        self._tokens = self._squares = self._busy = 0.0

    @property
    def tokens_per_s(self) -> float:
        """The mean; 0 before the first step."""
        return self._squares / self._busy if self._busy else 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Add a step."""
        mean = self._squares / self._tokens if self._tokens else 0.0
        keep = 1.0 - (1.0 - _FORGET) * min(1.0, tokens / mean if mean else 1.0)
        self._tokens = keep * self._tokens + tokens
        self._squares = keep * self._squares + tokens * tokens
        self._busy = keep * self._busy + tokens * seconds


def shared_blocks(one: Prompt, other: Prompt) -> int:
    """Return how many blocks two prompts share at their beginnings. Hashes of blocks are chained: O(log blocks)."""
    first, second = one.blocks, other.blocks
    return bisect_left(range(min(len(first), len(second))), True, key=lambda at: first[at] != second[at])
