"""The hottest prefixes of some keys, as trees: the beginnings that they have in common, how many have each, and who
holds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from treeline_epp.index.index import Index
from treeline_epp.index.matching import GUARD_BYTES

MOST_HOLDERS = 5


@dataclass(slots=True)
class Prefix:
    """A beginning that `count` keys share: the first `end` bytes of `key`, the parent the first `start`."""

    key: bytes
    start: int
    end: int
    count: int
    children: list[Prefix] = field(default_factory=list)


def hot_prefixes(keys: Sequence[bytes], most: int) -> list[Prefix]:
    """The beginnings that two or more keys share, nested, at most so many of them: those of the most keys.

    A parent is shared by at least as many keys as its children, and comes before them where they are equal: so whatever
    is shown, its ancestors are. Children come in order of their counts. O(n log n) comparisons of keys.
    """
    ordered = sorted(keys)
    roots: list[Prefix] = []
    found: list[tuple[Prefix, list[Prefix]]] = []
    todo = [(span, 0, roots) for span in _split(ordered, 0, len(ordered), 0)]
    while todo:
        (first, last), start, siblings = todo.pop()
        end = shared_bytes(ordered[first], ordered[last - 1])
        prefix = Prefix(ordered[first], start, end, last - first)
        found.append((prefix, siblings))
        todo += [(span, end, prefix.children) for span in _split(ordered, first, last, end)]
    found.sort(key=lambda one: (-one[0].count, one[0].end, one[0].key))
    for prefix, siblings in found[:most]:
        siblings.append(prefix)
    return roots


def _split(ordered: Sequence[bytes], first: int, last: int, at: int) -> list[tuple[int, int]]:
    """The spans of two keys or more that are equal in the byte `at`; they are equal before it."""
    spans = []
    while first < last and len(ordered[first]) == at:
        first += 1
    while first < last:
        end = first + 1
        while end < last and ordered[end][at] == ordered[first][at]:
            end += 1
        if end - first > 1:
            spans.append((first, end))
        first = end
    return spans


def shared_bytes(one: bytes, other: bytes) -> int:
    """How many bytes two keys begin with alike: the highest bit in which they differ tells."""
    length = min(len(one), len(other))
    differing = int.from_bytes(one[:length], "big") ^ int.from_bytes(other[:length], "big")
    return length - (differing.bit_length() + 7) // 8


@dataclass(frozen=True, slots=True)
class Holders:
    """Says which endpoints hold a prefix of one model and namespace, without asking thousands of them one by one.
    `names` of endpoints are by their rows."""

    index: Index
    scope: str
    namespace: str | None
    names: Mapping[int, str]
    now: float

    def of(self, key: bytes) -> tuple[int, list[tuple[str, int]]]:
        """How many hold some of it, and those that hold most, each with how many bytes of it."""
        match = self.index.match(self.scope, self.namespace, key, self.now)
        # What is predicted ends a few bytes before the end of what is asked for.
        reach = {pod.row: min(len(key), hit.reach + GUARD_BYTES) for pod, hit in match.special.items() if hit.reach}
        known = [np.fromiter(reach, np.int32, len(reach))]
        ends = [(min(len(key), one.reach + GUARD_BYTES) if one.reach else one.end, one.pods) for one in match.levels]
        for end, pods in sorted(ends, reverse=True):
            if end:
                rows = self.index.holders(pods)
                known.append(rows)
                for row in rows[: MOST_HOLDERS + len(match.special)].tolist():
                    reach.setdefault(row, end)
        best = sorted(((end, self.names[row]) for row, end in reach.items() if row in self.names), reverse=True)
        return len(np.unique(np.concatenate(known))), [(name, end) for end, name in best[:MOST_HOLDERS]]
