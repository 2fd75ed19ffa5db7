"""What requests of other pickers will have put into a pod's cache, before any event says so.

Another picker cannot send the text of each prompt. It sends *marks*: hashes of a few of the prompt's beginnings, which
end at places that all pickers know (`GRID`: each an eighth further than the one before). A picker computes the marks of
a prompt that it is asked for, and finds by them how far a pod is predicted to hold it: rounded down to the grid, by a
ninth of its length at most. The whole prompt has a mark of its own, at whatever length, so that the same prompt and one
that goes on from it are found to their end.

Marks are made of CRC-32 and multiplications, at some gigabytes a second: who makes two prompts with the same mark
misleads the choice for his own requests alone. They are sent sealed, and begin with a secret.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from msgspec.structs import replace
from treeline_wire.peers import MOST_MARKS, Opened

from treeline_epp.index.pods import Hit, Match, Pod

_FIRST, _LAST = 512, 1 << 20
MOST_KEPT = 200_000
"""Marks of all other pickers together, each once for a pod: some 70 MB. Of more, the oldest go first."""
MOST_PODS = 32
"""Pods that one mark is kept for: the newest. What all hold is no reason to choose one of them."""
MOST_LENGTHS = 4
"""Lengths of whole prompts that are kept apart after one place of the grid."""
_SWEPT = 512
_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15


def _grid() -> Iterator[int]:
    at = _FIRST
    while at <= _LAST:
        yield at
        at += at // 8


GRID: Final = tuple(_grid())
_STEPS: Final = tuple(pairwise((0, *GRID)))


_CRC_MASK: Final = (1 << 32) - 1


def _seed(secret: int, scope: str, namespace: str | None) -> int:
    # A namespace may be the empty text, which is not the same as none.
    text = f"{scope}\0{'' if namespace is None else '=' + namespace}".encode()
    return _mixed(_mixed(secret, zlib.crc32(text)), zlib.adler32(text))


def _mixed(state: int, value: int) -> int:
    state = ((state ^ value) * _GOLDEN + value) & _MASK
    return state ^ state >> 29


def _mark(state: int) -> int:
    return state >> 24


@dataclass(slots=True)
class Trail:
    """The marks of one prompt: `marks[n]` at `GRID[n - 1]`, as far as it reaches, `marks[0]` at its beginning. `states`
    are to go on from."""

    key: bytes
    states: list[int]
    marks: list[int]

    @classmethod
    def of(cls, key: bytes, secret: int, scope: str, namespace: str | None) -> Trail:
        """O(bytes) at memory speed."""
        state, view, size = _seed(secret, scope, namespace), memoryview(key), len(key)
        states, crc32 = [state], zlib.crc32
        for begin, end in _STEPS:
            if end > size:
                break
            # As `_mixed`, without a call.
            crc = crc32(view[begin:end], state & _CRC_MASK)
            state = ((state ^ crc) * _GOLDEN + crc) & _MASK
            state ^= state >> 29
            states.append(state)
        return cls(key, states, [0, *map(_mark, states[1:])])

    def mark_at(self, place: int, length: int) -> int:
        """Of the first `length` bytes, which end after this place and not after the next."""
        begin, state = GRID[place - 1] if place else 0, self.states[place]
        return _mark(_mixed(state, zlib.crc32(memoryview(self.key)[begin:length], state & _CRC_MASK)))

    def told(self, confirmed: int) -> tuple[tuple[int, ...], int, int]:
        """`(marks, length, tail)` to tell of a prompt of which a pod has `confirmed` bytes by its events.

        Prompts part near their ends more often than at their beginnings, and what they share counts by its length: so
        most marks are the last ones, and the others halve what is left.
        """
        last = len(self.states) - 1
        first = bisect_right(GRID, confirmed) + 1  # the first place beyond what is confirmed
        places: list[int] = []
        step = 1
        at = last
        while at >= first and len(places) < MOST_MARKS:
            places.append(at)
            if len(places) >= MOST_MARKS // 2:
                step *= 2
            at -= step
        size = len(self.key)
        whole = size > max(confirmed, GRID[last - 1] if last else 0) and size <= _LAST
        if whole and last and not places:
            places.append(last)  # what is found after it is found by it
        marks = tuple(self.marks[place] for place in reversed(places))
        return marks, size if whole else 0, self.mark_at(last, size) if whole else 0


@dataclass(eq=False, slots=True)
class Foresight:
    """One prediction: that `pod`, while its events are those of `bit`, will hold something until `ends_at`."""

    pod: Pod
    bit: int
    ends_at: float

    def holds(self, now: float) -> bool:
        """Does it still count?"""
        return self.ends_at > now and self.bit == self.pod.bit


class Landmarks:
    """The marks that other pickers have sent. `secret` is 64 bits that they share."""

    def __init__(self, secret: int, most: int = MOST_KEPT) -> None:
        self._secret = secret
        self._most = most
        self._size = 0
        self._marks: dict[int, dict[Pod, Foresight]] = {}
        self._lengths: dict[int, tuple[int, ...]] = {}
        self._queue: deque[int] = deque()
        self._newest: tuple[str, str | None, Trail] | None = None

    def __len__(self) -> int:
        return self._size

    def trail(self, scope: str, namespace: str | None, key: bytes) -> Trail:
        """Of a prompt; that of the newest is kept, since who picks also reserves."""
        known = self._newest
        if known is None or known[2].key is not key or known[:2] != (scope, namespace):
            known = self._newest = (scope, namespace, Trail.of(key, self._secret, scope, namespace))
        return known[2]

    def add(self, opened: Opened, pod: Pod, ends_at: float) -> Foresight | None:
        """Another picker has sent this request to `pod`. O(marks)."""
        if not opened.marks and not opened.length:
            return None
        foresight = Foresight(pod, pod.bit, ends_at)
        for mark in opened.marks:
            self._keep(mark, foresight)
        if opened.length:
            self._keep(opened.tail, foresight)
            before = opened.marks[-1] if opened.marks else 0  # a short prompt is found from its beginning
            lengths = self._lengths.get(before, ())
            if opened.length not in lengths:
                self._lengths[before] = (opened.length, *lengths[: MOST_LENGTHS - 1])
        while max(self._size, len(self._marks)) > self._most:
            self._drop(self._queue.popleft())
        return foresight

    def withdraw(self, opened: Opened, foresight: Foresight) -> None:
        """It will not come true. O(marks)."""
        for mark in (*opened.marks, opened.tail):
            held = self._marks.get(mark)
            if held is not None and held.get(foresight.pod) is foresight:
                self._forget(held, foresight.pod)

    def reach(self, trail: Trail, now: float) -> dict[Pod, int]:
        """How many bytes of the prompt each pod is foreseen to hold. O(its marks)."""
        found: dict[Pod, int] = {}
        marks, known = trail.marks, self._marks
        for place in [place for place, mark in enumerate(marks) if not place or mark in known]:
            if place:
                self._note(found, known[marks[place]], GRID[place - 1], now)
            for length in self._lengths.get(marks[place], ()):
                if length <= len(trail.key) and bisect_right(GRID, length) == place:
                    self._note(found, known.get(trail.mark_at(place, length), {}), length, now)
        return found

    def foreseen(self, match: Match, trail: Trail, now: float) -> Match:
        """The match, with what is foreseen beyond it."""
        special: dict[Pod, Hit] = {}
        for pod, end in self.reach(trail, now).items():
            hit = match.hit(pod)
            if end > hit.reach and not pod.hit_caps:  # what audits have found counts more than what is foreseen
                special[pod] = Hit(hit.tokens, hit.end, end)
        return replace(match, special={**match.special, **special}) if special else match

    def tick(self, now: float) -> None:
        """Let go of some of what does not count any more. Call about every 100 ms."""
        for _ in range(min(_SWEPT, len(self._queue))):
            mark = self._queue.popleft()
            held = self._marks.get(mark, {})
            for pod in [pod for pod, foresight in held.items() if not foresight.holds(now)]:
                self._forget(held, pod)
            if held:
                self._queue.append(mark)
            else:
                self._drop(mark)
        if not self._marks:
            self._lengths.clear()

    def _keep(self, mark: int, foresight: Foresight) -> None:
        held = self._marks.get(mark)
        if held is None:
            held = self._marks[mark] = {}
            self._queue.append(mark)
        if foresight.pod in held:
            self._forget(held, foresight.pod)  # and the newest again
        elif len(held) >= MOST_PODS:
            self._forget(held, next(iter(held)))
        held[foresight.pod] = foresight
        self._size += 1

    def _forget(self, held: dict[Pod, Foresight], pod: Pod) -> None:
        del held[pod]
        self._size -= 1

    def _drop(self, mark: int) -> None:
        self._size -= len(self._marks.pop(mark, ()))
        self._lengths.pop(mark, None)

    @staticmethod
    def _note(found: dict[Pod, int], held: dict[Pod, Foresight], end: int, now: float) -> None:
        for pod, foresight in held.items():
            if foresight.holds(now):
                found[pod] = max(found.get(pod, 0), end)

    def check(self) -> None:
        """Assert what always holds."""
        assert self._size == sum(map(len, self._marks.values())) <= self._most >= len(self._marks)
        assert all(len(held) <= MOST_PODS for held in self._marks.values())
        assert sorted(self._queue) == sorted(self._marks), "each is looked at in its turn"
        assert all(len(lengths) <= MOST_LENGTHS for lengths in self._lengths.values())
        assert self._lengths.keys() - {0} <= self._marks.keys()
