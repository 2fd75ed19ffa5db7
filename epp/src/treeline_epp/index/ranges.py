"""The predicted ranges of one edge: the part that each pod is predicted to hold, and until when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

PredictedRange = tuple[int, int, float]
"""A part of an edge: first byte, byte after the last, time at which the prediction ends."""

_MOST_GROUPS = 64
"""Most groups of an edge that a match reads. Ranges of one prompt on many pods are one group; a client that sends an
ever longer prompt, to another pod each time, makes one each time."""
_NEVER = float("-inf")


class Ranges(dict[int, PredictedRange]):
    """Ranges by the pod's bit. `groups` is cached until a change, since a hot prefix is predicted for every pod."""

    __slots__ = ("_groups", "_until")

    def __init__(self, given: Mapping[int, PredictedRange] | None = None) -> None:
        super().__init__(given or {})
        self._groups: Sequence[tuple[int, int, int]] = ()
        self._until = _NEVER

    def __setitem__(self, bit: int, known: PredictedRange) -> None:
        super().__setitem__(bit, known)
        self._until = _NEVER

    def __delitem__(self, bit: int) -> None:
        super().__delitem__(bit)
        self._until = _NEVER

    def groups(self, now: float) -> Sequence[tuple[int, int, int]]:
        """Return `(first byte, byte after the last, bits of pods)` of the ranges that have not ended. O(1); O(ranges)
        after a change or the end of a range.
        """
        if now >= self._until:
            found: dict[tuple[int, int], int] = {}
            self._until = float("inf")
            for bit, (low, high, ends_at) in self.items():
                if ends_at > now:
                    found[low, high] = found.get((low, high), 0) | bit
                    self._until = min(self._until, ends_at)
            self._groups = [(low, high, bits) for (low, high), bits in islice(found.items(), _MOST_GROUPS)]
        return self._groups


def join_ranges(old: PredictedRange | None, new: PredictedRange) -> PredictedRange:
    """Return one range for two of the same pod: their union if they touch, else the one that ends later in time."""
    if old is None:
        return new
    if old[0] <= new[1] and new[0] <= old[1]:
        return min(old[0], new[0]), max(old[1], new[1]), max(old[2], new[2])
    return old if old[2] > new[2] else new
