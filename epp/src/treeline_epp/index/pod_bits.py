"""The bits by which the trees know pods: given out, taken back, and used again once they are swept out of the trees."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from treeline_epp.index.pods import Pod


class PodBits:
    """Which pod has which bit. `owners` are the pods of all bits in use.

    A bit that is given back is *retired*: nobody asks for it, but marks in the trees still have it. A round of sweeping
    takes those out (`begin_round` … `end_round`), then its bits are free.
    """

    def __init__(self) -> None:
        self.owners: dict[int, Pod] = {}
        self.sweeping = 0
        self._retired = 0
        self._rows = np.full(64, -1, np.int32)
        self._free: list[int] = []
        self._slots = 0

    def take(self, pod: Pod) -> int:
        """A bit for a pod; it may have several. O(log free)."""
        if self._free:
            slot = heapq.heappop(self._free)
        else:
            slot = self._slots
            self._slots += 1
            if slot >= len(self._rows):
                self._rows = np.concatenate((self._rows, np.full(len(self._rows), -1, np.int32)))
        self._rows[slot] = pod.row
        self.owners[1 << slot] = pod
        return 1 << slot

    def retire(self, bit: int) -> Pod:
        """The bit stands for nothing any more; returns the pod that had it. O(1)."""
        self._retired |= bit
        return self.owners.pop(bit)

    def rows(self, bits: int) -> npt.NDArray[np.int32]:
        """The rows of the pods with these bits. O(bits) at memory speed."""
        if (pod := self.owners.get(bits)) is not None:
            return np.array((pod.row,), np.int32)
        data = np.frombuffer(bits.to_bytes((bits.bit_length() + 7) // 8, "little"), np.uint8)
        slots = np.flatnonzero(np.unpackbits(data, bitorder="little"))
        return self._rows[slots]

    def begin_round(self) -> bool:
        """From now on `sweeping` are the bits that have been retired so far. False if there are none."""
        self.sweeping, self._retired = self._retired, 0
        return self.sweeping != 0

    def end_round(self) -> None:
        """No mark has the bits of this round any more: they are free. O(bits)."""
        for slot in range(self.sweeping.bit_length()):
            if self.sweeping >> slot & 1:
                heapq.heappush(self._free, slot)
        self.sweeping = 0

    def check(self) -> None:
        """Assert that each bit is in use, retired or free, and only one of these."""
        used = self._retired | self.sweeping
        assert not self._retired & self.sweeping
        for bit, pod in self.owners.items():
            assert bit in (pod.bit, pod.staging, *(aged for aged, _ in pod.aged))
            assert not used & bit
            used |= bit
        free = sum(1 << slot for slot in self._free)
        assert not used & free
        assert used | free == (1 << self._slots) - 1
