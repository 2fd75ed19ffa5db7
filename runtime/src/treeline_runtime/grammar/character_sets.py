"""Sets of characters as ranges of code points: complements, cases, and digit, space and word.

No set has surrogates, since texts have none. Where dialects differ, there is a narrow set (all agree) and a wide one
(any of them).
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Iterable
from functools import cache
from re._casefix import _EXTRA_CASES  # type: ignore[import-not-found]

Ranges = tuple[tuple[int, int], ...]
"""First and last of ascending ranges that do not touch."""

LAST = sys.maxunicode


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The union of ranges, without surrogates. O(n log n)."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return _no_surrogates(merged)


def all_but(ranges: Iterable[tuple[int, int]]) -> Ranges:
    others, after = [], 0
    for first, last in (*sorted(ranges), (LAST + 1, LAST + 1)):
        if first > after:
            others.append((after, first - 1))
        after = max(after, last + 1)
    return _no_surrogates(others)


def _no_surrogates(ranges: list[tuple[int, int]]) -> Ranges:
    if not any(first <= 0xDFFF and last >= 0xD800 for first, last in ranges):
        return tuple(ranges)
    return tuple(
        (low, high)
        for first, last in ranges
        for low, high in ((first, min(last, 0xD7FF)), (max(first, 0xE000), last))
        if low <= high
    )


def with_cases(ranges: Ranges, *, wide: bool) -> Ranges:
    """With other cases. O(characters)."""
    chars = [chr(code) for first, last in ranges for code in range(first, last + 1)]
    found = {ord(c) for char in chars for c in (char, char.lower(), char.upper()) if len(c) == 1}
    if wide:
        found |= {code for char in chars for code in _alike().get(ord(char), ())}
    return tuple((code, code) for code in sorted(found))


_LAST_CASED = 0x1FFFF
"""Letters with cases are in the first two planes only."""


@cache
def _alike() -> dict[int, set[int]]:
    """Characters that any dialect treats as equal without regard to case, by each of them."""
    classes: dict[int, set[int]] = {}
    for char in filter(lambda char: char != char.lower() or char != char.upper(), map(chr, range(_LAST_CASED + 1))):
        code, cases = ord(char), (char.lower(), char.upper(), char.title(), char.casefold())
        others = {code, *(ord(one) for one in cases if len(one) == 1), *_EXTRA_CASES.get(code, ())}
        together = others.union(*(classes.get(one, ()) for one in others))
        classes |= dict.fromkeys(together, together)
    dotted = classes[ord("i")] | {0x130}  # its lower case is two characters
    return classes | dict.fromkeys(dotted, dotted)


ASCII: dict[str, Ranges] = {
    "digit": ((48, 57),),
    "space": ((9, 13), (32, 32)),
    "word": ((48, 57), (65, 90), (95, 95), (97, 122)),
}
_UNICODE = {"digit": r"\d+", "space": "[\\s\ufeff]+", "word": r"\w+"}


@cache
def unicode(name: str) -> Ranges:
    """Unicode's "digit", "space" and "word"."""
    every = array("I", range(LAST + 1)).tobytes().decode("utf-32", "surrogatepass")
    return union((found.start(), found.end() - 1) for found in re.finditer(_UNICODE[name], every))
