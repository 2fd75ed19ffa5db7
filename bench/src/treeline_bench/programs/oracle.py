"""What the best of all caches would have found: the tree of everything that was sent.

A prompt has to be computed where no earlier prompt and no earlier answer has the same tokens before it, and only there:
the sum of these parts is the length of all edges of the radix tree of the prompts, less what was computed as part of an
answer. No cache does better, whatever its size and the order in which requests are computed.
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
    """Tokens of prompts: all, those that the server had cached, and those that the best cache would have had."""

    prompt: int = 0
    cached: int = 0
    best: int = 0

    @property
    def rate(self) -> float:
        """The hit rate; 0 where nothing was sent."""
        return self.cached / self.prompt if self.prompt else 0.0

    @property
    def best_rate(self) -> float:
        return self.best / self.prompt if self.prompt else 0.0

    @property
    def vs_optimal(self) -> float:
        """1 where there was nothing to find."""
        return self.cached / self.best if self.best else 1.0


class Tree:
    """A radix tree as the sorted list of its sequences: neighbours share most."""

    def __init__(self) -> None:
        self._keys: list[bytes] = []

    def add(self, tokens: Sequence[int]) -> int:
        """→ how many tokens of the beginning were in the tree before. O(log n) comparisons, and a list's insertion."""
        key = array("I", tokens).tobytes()
        place = bisect_left(self._keys, key)
        shared = max((shared_length(near, key) for near in self._keys[max(place - 1, 0) : place + 1]), default=0)
        if shared < len(key):
            self._keys.insert(place, key)
        return shared // TOKEN_BYTES
