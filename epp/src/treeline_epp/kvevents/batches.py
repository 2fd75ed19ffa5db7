"""Batches of one publisher, applied to the index in order: which have been, and whether one comes a second time."""

from __future__ import annotations

from collections import Counter

from treeline_wire.events import EventBatch
from treeline_wire.keys import PrefixKeys

from treeline_epp.index.index import Index
from treeline_epp.index.pods import Pod

_REMEMBERED = 256
"""Remembered time stamps, to tell a batch that came twice from one of a new process."""


class AppliedBatches:
    """What has been applied of a process's batches. `next_seq` is the next one wanted, None before the first;
    `partial`: something is known to be missing. What happens is counted in `counts`."""

    def __init__(self, index: Index, pod: Pod, keys: PrefixKeys | None, counts: Counter[str]) -> None:
        self.next_seq: int | None = None
        self.partial = False
        self._index = index
        self._pod = pod
        self._keys = keys
        self._counts = counts
        self._times: dict[int, float] = {}

    def apply(self, seq: int, batch: EventBatch | None) -> None:
        """The next batch; None if it could not be decoded."""
        self.next_seq = seq + 1
        self._times.pop(seq - _REMEMBERED, None)
        if batch is None:
            self._counts["undecodable"] += 1
            self.partial = True
            return
        self._times[seq] = batch.ts
        self._counts["applied"] += 1
        if batch.rejected:
            self._counts["rejected"] += sum(batch.rejected.values())
            self.partial = True
        apply, pod, keys = self._index.apply, self._pod, self._keys
        for event in batch.events:
            apply(pod, event, keys)

    def has(self, seq: int, batch: EventBatch | None) -> bool:
        """Is this a second copy of a batch that was applied?"""
        return batch is not None and self._times.get(seq) == batch.ts

    def contradicts(self, seq: int, batch: EventBatch | None) -> bool:
        """Is this another batch than the one that was applied under this number?"""
        return batch is None or self._times.get(seq) not in (None, batch.ts)

    def accept_gap(self, seq: int, now: float) -> None:
        """Batches before `seq` are lost for good: go on from there, and let what is known grow old."""
        self._counts["lost"] += 1
        self.partial = True
        self.next_seq = seq
        self._index.age(self._pod, now)

    def begin_after(self, seq: int) -> None:
        """A snapshot has brought all up to `seq`."""
        self.next_seq = seq + 1
        self.partial = False
        self._times.clear()

    def forget(self) -> None:
        """Another process, another cache: nothing has been applied, and nothing is held."""
        self._counts["epochs"] += 1
        self._index.clear(self._pod)
        self.next_seq = None
        self.partial = False
        self._times.clear()
