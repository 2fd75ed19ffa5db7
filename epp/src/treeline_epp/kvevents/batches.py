"""Batches of one publisher, applied to the index in order, and without repeats.

A batch is not in the index at once: it waits in line, and `work` does a bounded part of it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.msgpack import encode
from treeline_wire.events import Event, EventBatch
from treeline_wire.keys import PrefixKeys

from treeline_epp.index.index import Index
from treeline_epp.index.limits import SLICE, weight
from treeline_epp.index.pods import Pod
from treeline_epp.kvevents.item_events import ItemEvents

_REMEMBERED = 256
"""Remembered time stamps: they tell a repeated batch from one of a new process."""
AGE_EVERY_S = 15.0
"""Least seconds between two times that entries begin to age: each takes a bit of the index while it lasts, and some
publishers have gaps all the time."""
_AGEING = 64
"""The `weight` of ageing a pod's blocks, in the scale of events."""


class _Events(NamedTuple):
    """The rest of a batch, and the method of the index that takes it: `Index.apply`, or `Index.stage`."""

    left: deque[Event]
    enter: Callable[[Pod, Event, PrefixKeys | None], None]


@dataclass(eq=False, slots=True)
class AppliedBatches:
    """The applied batches of one process. `next_seq` is the next one wanted, None before the first; `partial`: some
    entries are known to be missing. `counts` has the number of each kind of occurrence.
    """

    index: Index
    pod: Pod
    keys: PrefixKeys | None
    counts: Counter[str]
    unread: Counter[str] = field(default_factory=Counter)
    """Events that could not be decoded, by reason; a batch that could not be decoded counts as one."""
    next_seq: int | None = None
    partial: bool = False
    reader: ItemEvents | None = None
    """Reads the events first, of a model that takes images."""
    _times: dict[int, float] = field(default_factory=dict)
    _aged_at: float = float("-inf")
    _age_due: float = float("inf")
    _fresh: bool = False
    _line: deque[_Events | float] = field(default_factory=deque)  # and times to age entries

    @property
    def busy(self) -> bool:
        """Whether some taken batches are not in the index yet."""
        return bool(self._line) or self.index.grafts(self.pod)

    def work(self) -> None:
        """Do a `SLICE` of the waiting work, or up to one event more."""
        line, pod, keys, reader, budget = self._line, self.pod, self.keys, self.reader, SLICE
        while line and budget > 0:
            first = line[0]
            if isinstance(first, float):
                self.index.age(pod, first)
                budget -= _AGEING
                line.popleft()
                continue
            left, enter = first
            while left and budget > 0:
                event = left.popleft()
                budget -= weight(event)
                read = event if reader is None else reader.read(event)
                if read is not None:
                    enter(pod, read, keys)
            if not left:
                line.popleft()
        if budget > 0:
            self.index.graft(pod.scope, budget)

    def apply(self, seq: int, batch: EventBatch | None) -> None:
        """Take the next batch; None if it could not be decoded. `work` puts it into the index."""
        self.next_seq = seq + 1
        self._times.pop(seq - _REMEMBERED, None)
        if batch is None:
            self.counts["undecodable"] += 1
            self.unread["undecodable"] += 1
            self.partial = True
            return
        self._times[seq] = batch.ts
        self.counts["applied"] += 1
        self.counts["understood"] += len(batch.events)
        self._fresh = True
        if batch.rejected:
            self.counts["rejected"] += sum(batch.rejected.values())
            self.unread.update(batch.rejected)
            self.partial = True
        self._line.append(_Events(deque(batch.events), self.index.apply))

    def stage(self, events: Iterable[Event]) -> None:
        """Take a part of a snapshot."""
        self._line.append(_Events(deque(events), self.index.stage))

    def has(self, seq: int, batch: EventBatch | None) -> bool:
        """Return whether this is a second copy of an applied batch."""
        return batch is not None and self._times.get(seq) == batch.ts

    def contradicts(self, seq: int, batch: EventBatch | None) -> bool:
        """Return whether this batch differs from the one applied under this number."""
        return batch is None or self._times.get(seq) not in (None, batch.ts)

    def accept_gap(self, seq: int, now: float) -> None:
        """Handle batches before `seq` that are lost for good: go on from there, and let the entries age."""
        self.counts["lost"] += 1
        self.next_seq = seq
        self._doubt(now)

    def accept_unverified(self, now: float) -> None:
        """Handle a reconnect after which the process may be another one, unless its next batch repeats a known number:
        let the entries age.
        """
        self.counts["unverified"] += 1
        self._doubt(now)

    def tick(self, now: float) -> None:
        """Handle the passing of time."""
        if now >= self._age_due:
            self._age(now)

    def _doubt(self, now: float) -> None:
        self.partial = True
        due = self._aged_at + AGE_EVERY_S
        if not self._fresh:
            return  # all entries age already
        if now >= due:
            self._age(now)
        else:  # at that time all entries age, these too
            self._age_due = due

    def _age(self, now: float) -> None:
        self._aged_at, self._age_due, self._fresh = now, float("inf"), False
        self._line.append(float(now))

    def begin_after(self, seq: int) -> None:
        """Complete a snapshot that has all batches up to `seq`, and replaces the pod's entries. No work may wait."""
        assert not self._line
        self.index.end_snapshot(self.pod)
        self._age_due, self._fresh = float("inf"), True
        self.next_seq = seq + 1
        self.partial = False
        self._times.clear()

    def forget(self) -> None:
        """Begin again after a change of process: no batch is applied, and the pod holds nothing."""
        self.counts["epochs"] += 1
        self._aged_at, self._age_due, self._fresh = float("-inf"), float("inf"), False
        self._line.clear()
        if self.reader is not None:
            self.reader.clear()
        self.index.clear(self.pod)
        self.next_seq = None
        self.partial = False
        self._times.clear()


class WaitingBatches:
    """Live batches that wait for an answer, in order: bounded in number and in bytes."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._kept: deque[tuple[int, EventBatch | None, int]] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def first(self) -> int:
        """The number of the first of them."""
        return self._kept[0][0]

    def append(self, came: tuple[int, EventBatch | None]) -> int:
        """Add a batch; return how many of the oldest were dropped, which leaves a gap that will be noticed."""
        size = 0 if came[1] is None else len(encode(came[1].events))
        self._kept.append((*came, size))
        self._bytes += size
        before = len(self._kept)
        while self._kept and (len(self._kept) > self._most or self._bytes > self._most_bytes):
            self.popleft()
        return before - len(self._kept)

    def popleft(self) -> tuple[int, EventBatch | None]:
        """Remove and return the first batch."""
        seq, batch, size = self._kept.popleft()
        self._bytes -= size
        return seq, batch

    def clear(self) -> None:
        """Drop all."""
        self._kept.clear()
        self._bytes = 0
