"""A drafter without weights: what followed the last tokens where the same ones were before, in the request's own text.

Often right where an answer repeats its prompt or itself: edits of code, summaries, tables, tool calls.
"""

from __future__ import annotations

from collections.abc import Sequence

LENGTHS = (8, 5, 3)
"""Tokens that must be the same; longer ones guess better."""
WINDOW = 32_768
"""Tokens at the end of a prompt that are searched; an index of them takes 10 MB."""
AT_ONCE = 512
"""Tokens that are indexed at once, in half a millisecond; the rest of a long prompt follows in the next steps."""


class Ngrams:
    """Implements `Drafter`, in constant time for each new token."""

    def __init__(self) -> None:
        self._after: tuple[dict[int, int], ...] = tuple({} for _ in LENGTHS)
        """For each length, the hash of tokens → the position after them where they were last, if a token is there."""
        self._indexed = -1
        """The positions before this one are indexed; -1: none yet."""

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        self._index(tokens)
        if self._indexed < len(tokens):
            return []
        for length, after in zip(LENGTHS, self._after, strict=True):
            at = after.get(hash(tuple(tokens[-length:])))
            if at is not None and at < len(tokens):
                period = tokens[at : at + most]
                return [period[i % len(period)] for i in range(most)]
        return []

    def _index(self, tokens: Sequence[int]) -> None:
        if self._indexed < 0:
            self._indexed = max(len(tokens) - WINDOW, 0)
        begin, end = min(self._indexed, len(tokens)), min(len(tokens), self._indexed + AT_ONCE)
        for length, after in zip(LENGTHS, self._after, strict=True):
            for at in range(max(begin, length), end):
                after[hash(tuple(tokens[at - length : at]))] = at
        self._indexed = end
