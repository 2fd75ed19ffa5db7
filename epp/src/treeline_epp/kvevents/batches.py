"""Batches of one publisher, applied to the index in order: which have been, and whether one comes a second time.

What is taken is not in the index at once where it is much: it waits in line, and `work` does a bounded part of it.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from treeline_wire.events import AllBlocksCleared, Event, EventBatch
from treeline_wire.keys import PrefixKeys

from treeline_epp.index.index import Index
from treeline_epp.index.pods import Pod
from treeline_epp.kvevents.pieces import PIECE, pieces

_REMEMBERED = 256
"""Remembered time stamps, to tell a batch that came twice from one of a new process."""
AGE_EVERY_S = 15.0
"""What is known begins to age no more often: each time takes a bit of the index for as long as it lasts, and some
publishers have gaps all the time."""


@dataclass(eq=False, slots=True)
class AppliedBatches:
    """What has been applied of a process's batches. `next_seq` is the next one wanted, None before the first;
    `partial`: something is known to be missing. What happens is counted in `counts`."""

    index: Index
    pod: Pod
    keys: PrefixKeys | None
    counts: Counter[str]
    next_seq: int | None = None
    partial: bool = False
    _times: dict[int, float] = field(default_factory=dict)
    _aged_at: float = float("-inf")
    _age_due: float = float("inf")
    _fresh: bool = False
    _line: deque[Event | float] = field(default_factory=deque)  # events, and times at which what was before them ages

    @property
    def busy(self) -> bool:
        """Is something taken that is not in the index yet?"""
        return bool(self._line)

    def work(self, blocks: int = PIECE) -> None:
        """Do so many blocks of what waits, or a piece more."""
        line, apply, pod, keys = self._line, self.index.apply, self.pod, self.keys
        while line and blocks > 0:
            what = line.popleft()
            if isinstance(what, float):
                self.index.age(pod, what)
                continue
            blocks -= 1 if isinstance(what, AllBlocksCleared) else max(1, len(what.block_hashes))
            apply(pod, what, keys)

    def apply(self, seq: int, batch: EventBatch | None) -> None:
        """The next batch; None if it could not be decoded. `work` puts it into the index."""
        self.next_seq = seq + 1
        self._times.pop(seq - _REMEMBERED, None)
        if batch is None:
            self.counts["undecodable"] += 1
            self.partial = True
            return
        self._times[seq] = batch.ts
        self.counts["applied"] += 1
        self._fresh = True
        if batch.rejected:
            self.counts["rejected"] += sum(batch.rejected.values())
            self.partial = True
        for event in batch.events:
            self._line.extend(pieces(event))

    def has(self, seq: int, batch: EventBatch | None) -> bool:
        """Is this a second copy of a batch that was applied?"""
        return batch is not None and self._times.get(seq) == batch.ts

    def contradicts(self, seq: int, batch: EventBatch | None) -> bool:
        """Is this another batch than the one that was applied under this number?"""
        return batch is None or self._times.get(seq) not in (None, batch.ts)

    def accept_gap(self, seq: int, now: float) -> None:
        """Batches before `seq` are lost for good: go on from there, and let what is known grow old."""
        self.counts["lost"] += 1
        self.next_seq = seq
        self._doubt(now)

    def accept_unverified(self, now: float) -> None:
        """Nobody can tell whether this is still the same process, unless its next batch has a number that was there
        before: let what is known grow old."""
        self.counts["unverified"] += 1
        self._doubt(now)

    def tick(self, now: float) -> None:
        """Time passed."""
        if now >= self._age_due:
            self._age(now)

    def _doubt(self, now: float) -> None:
        self.partial = True
        due = self._aged_at + AGE_EVERY_S
        if not self._fresh:
            return  # nothing is known that does not age already
        if now >= due:
            self._age(now)
        else:  # then all that is known by then ages, this too
            self._age_due = due

    def _age(self, now: float) -> None:
        self._aged_at, self._age_due, self._fresh = now, float("inf"), False
        self._line.append(float(now))

    def begin_after(self, seq: int) -> None:
        """A snapshot has brought all up to `seq`, and takes the place of what the pod holds."""
        self._line.clear()
        self.index.end_snapshot(self.pod)
        self._age_due, self._fresh = float("inf"), True
        self.next_seq = seq + 1
        self.partial = False
        self._times.clear()

    def forget(self) -> None:
        """Another process, another cache: nothing has been applied, and nothing is held."""
        self.counts["epochs"] += 1
        self._aged_at, self._age_due, self._fresh = float("-inf"), float("inf"), False
        self._line.clear()
        self.index.clear(self.pod)
        self.next_seq = None
        self.partial = False
        self._times.clear()
