"""Predictions from other pickers: the prefixes that their requests will put into pods' caches.

Another picker cannot send the text of each prompt. It sends *marks*: hashes of a few of the prompt's beginnings, which
end at lengths that all pickers know (`GRID`: each an eighth longer than the one before). A picker computes the marks of
a prompt, and finds by them how far a pod is predicted to hold it: rounded down to the grid, by a ninth of its length at
most.

Marks are made of CRC-32 and multiplications, at some gigabytes a second: a client that makes two prompts with the same
mark misleads the choice only for its own requests. They are sent sealed, and begin with a secret.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from msgspec.structs import replace
from treeline_wire.peers import MOST_MARKS, Opened

from treeline_epp.index.pods import Hit, Match, Pod

_FIRST, _LAST = 512, 1 << 20
MOST_KEPT = 200_000
"""Most marks of all other pickers together, each once for a pod: some 70 MB. The oldest go first."""
MOST_PODS = 32
"""Most pods of one mark: the newest ones. A prefix that all pods hold decides nothing."""
_SWEPT = 512
_MASK: Final = (1 << 64) - 1
_CRC_MASK: Final = (1 << 32) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15


def _grid() -> Iterator[int]:
    at = _FIRST
    while at <= _LAST:
        yield at
        at += at // 8


GRID: Final = tuple(_grid())
_STEPS: Final = tuple(pairwise((0, *GRID)))


def _mixed(state: int, value: int) -> int:
    state = ((state ^ value) * _GOLDEN + value) & _MASK
    return state ^ state >> 29


def marks_of(key: bytes, secret: int, scope: str, namespace: str | None) -> list[int]:
    """Return the marks of a prompt at the lengths of the grid, up to its own. O(bytes) at memory speed."""
    # A namespace may be the empty text, which differs from none.
    text = f"{scope}\0{'' if namespace is None else '=' + namespace}".encode()
    state, view, size = _mixed(_mixed(secret, zlib.crc32(text)), zlib.adler32(text)), memoryview(key), len(key)
    marks, crc32 = [], zlib.crc32
    for begin, end in _STEPS:
        if end > size:
            break
        # As `_mixed`, without a call.
        crc = crc32(view[begin:end], state & _CRC_MASK)
        state = ((state ^ crc) * _GOLDEN + crc) & _MASK
        state ^= state >> 29
        marks.append(state >> 24)
    return marks


def told(marks: Sequence[int], confirmed: int) -> tuple[int, ...]:
    """Return the marks to send for a prompt of which a pod has `confirmed` bytes by its events.

    Prompts usually diverge late, and a shared prefix counts by its length: so most marks are the last ones, and the
    others halve the rest.
    """
    first = bisect_right(GRID, confirmed)
    places: list[int] = []
    at, step = len(marks) - 1, 1
    while at >= first and len(places) < MOST_MARKS:
        places.append(at)
        if len(places) >= MOST_MARKS // 2:
            step *= 2
        at -= step
    return tuple(marks[place] for place in reversed(places))


@dataclass(eq=False, slots=True)
class Foresight:
    """One prediction: `pod`, while its events are those of `bit`, will hold a prefix until `ends_at`."""

    pod: Pod
    bit: int
    ends_at: float

    def holds(self, now: float) -> bool:
        """Return whether it still counts."""
        return self.ends_at > now and self.bit == self.pod.bit


class Landmarks:
    """The marks that other pickers have sent. `secret` is 64 bits that they share."""

    def __init__(self, secret: int, most: int = MOST_KEPT) -> None:
        self._secret = secret
        self._most = most
        self._size = 0
        self._marks: dict[int, dict[Pod, Foresight]] = {}
        self._queue: deque[int] = deque()
        self._newest: tuple[bytes, str, str | None, list[int]] | None = None

    def __len__(self) -> int:
        return self._size

    def marks(self, scope: str, namespace: str | None, key: bytes) -> list[int]:
        """Return the marks of a prompt; the newest ones are cached, since a pick is followed by a reservation."""
        known = self._newest
        if known is None or known[0] is not key or known[1:3] != (scope, namespace):
            known = self._newest = (key, scope, namespace, marks_of(key, self._secret, scope, namespace))
        return known[3]

    def add(self, opened: Opened, pod: Pod, ends_at: float) -> Foresight | None:
        """Add a request that another picker has sent to `pod`. O(marks)."""
        if not opened.marks:
            return None
        foresight = Foresight(pod, pod.bit, ends_at)
        for mark in opened.marks:
            self._keep(mark, foresight)
        while max(self._size, len(self._marks)) > self._most:
            self._drop(self._queue.popleft())
        return foresight

    def withdraw(self, opened: Opened, foresight: Foresight) -> None:
        """Drop a prediction that will not come true. O(marks)."""
        for mark in opened.marks:
            held = self._marks.get(mark)
            if held is not None and held.get(foresight.pod) is foresight:
                self._forget(held, foresight.pod)

    def reach(self, marks: Sequence[int], now: float) -> dict[Pod, int]:
        """Return how many bytes of the prompt with these marks each pod is predicted to hold. O(marks)."""
        found: dict[Pod, int] = {}
        known = self._marks
        for place in [place for place, mark in enumerate(marks) if mark in known]:
            for pod, foresight in known[marks[place]].items():
                if foresight.holds(now):
                    found[pod] = GRID[place]
        return found

    def foreseen(self, match: Match, marks: Sequence[int], now: float) -> Match:
        """Return the match, extended by the predictions."""
        special: dict[Pod, Hit] = {}
        for pod, end in self.reach(marks, now).items():
            hit = match.hit(pod)
            if end > hit.reach and not pod.hit_caps:  # audits count more than predictions
                special[pod] = replace(hit, reach=end)
        return replace(match, special={**match.special, **special}) if special else match

    def tick(self, now: float) -> None:
        """Drop some marks that do not count any more. Call about every 100 ms."""
        for _ in range(min(_SWEPT, len(self._queue))):
            mark = self._queue.popleft()
            held = self._marks.get(mark, {})
            for pod in [pod for pod, foresight in held.items() if not foresight.holds(now)]:
                self._forget(held, pod)
            if held:
                self._queue.append(mark)
            else:
                self._drop(mark)

    def _keep(self, mark: int, foresight: Foresight) -> None:
        held = self._marks.get(mark)
        if held is None:
            held = self._marks[mark] = {}
            self._queue.append(mark)
        if foresight.pod in held:
            self._forget(held, foresight.pod)  # it becomes the newest again
        elif len(held) >= MOST_PODS:
            self._forget(held, next(iter(held)))
        held[foresight.pod] = foresight
        self._size += 1

    def _forget(self, held: dict[Pod, Foresight], pod: Pod) -> None:
        del held[pod]
        self._size -= 1

    def _drop(self, mark: int) -> None:
        self._size -= len(self._marks.pop(mark, ()))

    def check(self) -> None:
        """Assert the invariants."""
        assert self._size == sum(map(len, self._marks.values())) <= self._most >= len(self._marks)
        assert all(len(held) <= MOST_PODS for held in self._marks.values())
        assert sorted(self._queue) == sorted(self._marks), "each is looked at in its turn"
