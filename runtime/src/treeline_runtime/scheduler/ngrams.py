"""A drafter without weights: what followed the last tokens where the same ones were before, in the request's own text.

Often right where an answer repeats its prompt or itself: edits of code, summaries, tables, tool calls.
"""

from __future__ import annotations

from collections.abc import Sequence

from treeline_wire.media import FIRST_ID

LENGTHS = (8, 5, 3)
"""Tokens that must be the same; longer ones guess better."""
WINDOW = 32_768
"""Tokens at the end of a prompt that are searched; an index of them takes 10 MB."""
AT_ONCE, LEAST = 512, 16
"""Tokens that a step indexes, of all requests and at least of each: half a millisecond, or 4 where 256 requests begin
together. The rest of a long prompt follows in the next steps."""


class Room:
    """What is left of `AT_ONCE` in this step."""

    def __init__(self) -> None:
        self.left = AT_ONCE


class Ngrams:
    """Implements `Drafter`, in constant time for each new token."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._after: tuple[dict[int, int], ...] = tuple({} for _ in LENGTHS)
        """For each length, the hash of tokens → the position after them where they were last, if a token is there."""
        self._indexed = -1
        """The positions before this one are indexed; -1: none yet."""
        self.same = 0
        """Tokens that were the same for the last guess; 0: there was none."""

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        self._index(tokens)
        self.same = 0
        if self._indexed < len(tokens):
            return []
        for length, after in zip(LENGTHS, self._after, strict=True):
            at = after.get(hash(tuple(tokens[-length:])))
            if at is not None and at < len(tokens):
                self.same = length
                period = tokens[at : at + most]
                return [period[i % len(period)] for i in range(most)]
        return []

    def _index(self, tokens: Sequence[int]) -> None:
        if self._indexed < 0:
            self._indexed = max(len(tokens) - WINDOW, 0)
        begin, end = min(self._indexed, len(tokens)), min(len(tokens), self._indexed + max(self._room.left, LEAST))
        self._room.left -= max(end - begin, 0)
        for length, after in zip(LENGTHS, self._after, strict=True):
            for at in range(max(begin, length), end):
                if tokens[at] >= FIRST_ID:  # of an image: nobody says it
                    continue
                after[hash(tuple(tokens[at - length : at]))] = at
        self._indexed = end
