"""The hits of the best possible cache: the radix tree of all prompts and answers.

A prompt's tokens must be computed only where no earlier prompt or answer has the same tokens: the sum is the length of
the prompts' radix tree, less what answers computed. No cache of any size or order does better.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from treeline_lang.ordering import shared_length

TOKEN_BYTES = 4


@dataclass
class Found:
    """Prompt tokens: all, the number that the server had cached, and the number that the best cache would have had."""

    prompt: int = 0
    cached: int = 0
    best: int = 0

    @property
    def rate(self) -> float:
        """The hit rate; 0 if nothing was sent."""
        return self.cached / self.prompt if self.prompt else 0.0

    @property
    def best_rate(self) -> float:
        return self.best / self.prompt if self.prompt else 0.0

    @property
    def vs_optimal(self) -> float:
        """1 if there was nothing to find."""
        return self.cached / self.best if self.best else 1.0


class Tree:
    """A radix tree as a sorted list of sequences: neighbours share most."""

    def __init__(self) -> None:
        self._keys: list[bytes] = []

    def add(self, tokens: Sequence[int]) -> int:
        """Returns how many leading tokens were in the tree before. O(log n) comparisons, and a list insertion."""
        key = array("I", tokens).tobytes()
        place = bisect_left(self._keys, key)
        shared = max((shared_length(near, key) for near in self._keys[max(place - 1, 0) : place + 1]), default=0)
        if shared < len(key):
            self._keys.insert(place, key)
        return shared // TOKEN_BYTES
