"""Patterns that end an output: finds a match in a growing text, in linear time.

Patterns are parsed like those of constraints (`grammar.patterns`), so nothing needs backtracking. Glushkov's automaton:
a position per set of characters, a bit per position. A character of text costs one `|` per matching position, and
nothing if cached.
"""

from __future__ import annotations

import functools
from typing import Final

from treeline_runtime.grammar.backend import GrammarError
from treeline_runtime.grammar.patterns import Chars, Choice, Node, Repeat, Sequence, within

MAX_POSITIONS: Final = 256
"""Positions of a pattern: characters and sets, times their repetitions."""
REMEMBERED: Final = 1024
"""The most characters, and sets of positions, that an automaton caches."""
KEPT: Final = 128
"""Cached automata, each with up to half a megabyte. A new one takes some milliseconds."""

Part = tuple[bool, int, int]
"""Whether it may be empty, where it may begin, and where it may end."""


class Automaton:
    """The automaton of one pattern; raises GrammarError. A state is the places where the next character may match, and
    whether there is a match."""

    def __init__(self, pattern: str) -> None:
        node = within(pattern)
        if _size(node) > MAX_POSITIONS:
            raise GrammarError(f"has more than {MAX_POSITIONS} characters and sets, as often as they are repeated")
        self._sets = list[Chars]()
        self._next = list[int]()
        empty, first, self._ends = self._part(node)
        self.start: Final = first, empty
        self._having = functools.lru_cache(REMEMBERED)(self._having_char)
        self._after = functools.lru_cache(REMEMBERED)(self._after_all)

    def feed(self, state: tuple[int, bool], text: str) -> tuple[int, bool]:
        for char in text:
            state = self._after(state[0] & self._having(char))
        return state

    def _having_char(self, char: str) -> int:
        code = ord(char)
        return sum(
            1 << at for at, chars in enumerate(self._sets) if any(first <= code <= last for first, last in chars.ranges)
        )

    def _after_all(self, taken: int) -> tuple[int, bool]:
        following = 0
        for at in _bits(taken):
            following |= self._next[at]
        return following, bool(taken & self._ends)

    def _part(self, node: Node) -> Part:
        match node:
            case Chars():
                self._sets.append(node)
                self._next.append(0)
                here = 1 << len(self._sets) - 1
                return False, here, here
            case Sequence(parts):
                return self._joined([self._part(part) for part in parts])
            case Choice(parts):
                empty, first, last = False, 0, 0
                for also_empty, begins, ends in map(self._part, parts):
                    empty, first, last = empty or also_empty, first | begins, last | ends
                return empty, first, last
            case Repeat(part, least, most):
                copies = [self._part(part) for _ in range(least)]
                for _ in range(1 if most is None else most - least):
                    _, first, last = self._part(part)
                    if most is None:
                        self._follow(last, first)
                    copies.append((True, first, last))
                return self._joined(copies)
        raise AssertionError(node)

    def _joined(self, parts: list[Part]) -> Part:
        empty, first, last = True, 0, 0
        for also_empty, begins, ends in parts:
            self._follow(last, begins)
            first |= begins if empty else 0
            last = ends | (last if also_empty else 0)
            empty &= also_empty
        return empty, first, last

    def _follow(self, last: int, first: int) -> None:
        for at in _bits(last):
            self._next[at] |= first


automaton = functools.lru_cache(KEPT)(Automaton)


class RegexFinder:
    """Whether the text so far matches one of some patterns, as `re.search` on all of it."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self._found = [(pattern, automaton(pattern)) for pattern in patterns]
        self._states = [one.start for _, one in self._found]

    def feed(self, text: str, *, ignore: bool = False) -> str | None:
        """The first of the patterns that match now. `ignore`: matches are searched for again."""
        matched = None
        for i, (pattern, one) in enumerate(self._found):
            self._states[i] = one.feed(self._states[i], text)
            if self._states[i][1]:
                matched = matched or pattern
                self._states[i] = one.start if ignore else self._states[i]
        return None if ignore else matched


def _size(node: Node) -> int:
    match node:
        case Sequence(parts) | Choice(parts):
            return sum(map(_size, parts))
        case Repeat(part, least, most):
            return _size(part) * (least + 1 if most is None else most)
    return 1


def _bits(mask: int) -> list[int]:
    return [at for at in range(mask.bit_length()) if mask >> at & 1]
