"""The host tier: which slot of a slab of host memory has which page.

A slot is free, being written, or has a page, which some may be reading. Only pages that nobody reads are evicted, the
least recently used first. The bookkeeping is pure; `Slab` is the memory.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

Lower = Literal["CPU", "DISK", "PEER"]
"""Where pages outside the device are, the nearest first: the tiers below it, and another runtime."""


@dataclass(slots=True)
class Entry:
    """A page's slot."""

    slot: int
    checksum: int | None = None
    """None: it is being written."""
    source: Lower = "CPU"
    """Where it came from; CPU: from the device."""
    readers: int = 0


class HostTier:
    """Pages by digest. Each operation is O(1) per page."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._clear()

    def _clear(self) -> None:
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._entries: dict[bytes, Entry] = {}
        self._evictable: OrderedDict[bytes, None] = OrderedDict()
        """Pages that nobody reads, the least recently used first."""

    @property
    def num_pages(self) -> int:
        """Pages that are here, or being written."""
        return len(self._entries)

    def __contains__(self, digest: bytes) -> bool:
        """Whether the page is here, or being written."""
        return digest in self._entries

    def has(self, digest: bytes) -> bool:
        """Whether the page can be read."""
        entry = self._entries.get(digest)
        return entry is not None and entry.checksum is not None

    def touch(self, digests: Sequence[bytes]) -> None:
        """Pages of one sequence, in order, were used: a page is of no use without those before it, so the last one is
        evicted first."""
        for digest in reversed(digests):
            if digest in self._evictable:
                self._evictable.move_to_end(digest)

    # ---- writing ------------------------------------------------------------------------------------------

    def begin_write(self, digest: bytes) -> tuple[int | None, bytes | None]:
        """Takes a slot for a page that has none. Returns the slot, and the page evicted from it; (None, None) if every
        slot is written or read."""
        assert digest not in self._entries
        evicted = None
        if not self._free:
            if not self._evictable:
                return None, None
            evicted, _ = self._evictable.popitem(last=False)
            self._free.append(self._entries.pop(evicted).slot)
        entry = self._entries[digest] = Entry(self._free.pop())
        return entry.slot, evicted

    def end_write(self, digest: bytes, checksum: int, source: Lower = "CPU") -> None:
        """The page is in its slot."""
        entry = self._entries[digest]
        assert entry.checksum is None
        entry.checksum, entry.source = checksum, source
        self._evictable[digest] = None

    def cancel_write(self, digest: bytes) -> None:
        """Nothing writes to the slot any more, and the page is not in it."""
        entry = self._entries.pop(digest)
        assert entry.checksum is None
        self._free.append(entry.slot)

    # ---- reading ------------------------------------------------------------------------------------------

    def begin_read(self, digest: bytes) -> Entry:
        """Keeps the page until `end_read`."""
        entry = self._entries[digest]
        assert entry.checksum is not None
        entry.readers += 1
        self._evictable.pop(digest, None)
        return entry

    def end_read(self, digest: bytes) -> None:
        """Counts as a use."""
        entry = self._entries[digest]
        assert entry.readers > 0
        entry.readers -= 1
        if not entry.readers:
            self._evictable[digest] = None

    def drop(self, digest: bytes) -> bool:
        """Removes a page that turned out to be bad, unless others read it: they will see the same. Returns whether it
        is gone."""
        if digest not in self._evictable:
            return False
        del self._evictable[digest]
        self._free.append(self._entries.pop(digest).slot)
        return True

    def clear(self) -> list[bytes]:
        """Removes all pages, and returns them; none may be written or read."""
        assert len(self._evictable) == len(self._entries), "cleared while pages are copied"
        gone = list(self._entries)
        self._clear()
        return gone

    def check_integrity(self) -> None:
        slots = [entry.slot for entry in self._entries.values()]
        assert sorted(slots + self._free) == list(range(self.num_slots)), "a slot is lost, or has two pages"
        idle = {digest for digest, entry in self._entries.items() if entry.checksum is not None and not entry.readers}
        assert idle == set(self._evictable), "entries and the order of eviction disagree"


class Slab:
    """Host memory for pages. On CUDA it is pinned, so that copies run beside steps. The ranks of a model share it, and
    each copies its own part of every page."""

    def __init__(
        self, num_slots: int, page_bytes: int, device: torch.device, part: slice | None = None, place: str | None = None
    ) -> None:
        """part: this rank's bytes of a page; None: there is one rank. place: another rank's, which has made it. Raises
        OSError or MemoryError if the system does not give so much memory, RuntimeError if it does not pin it."""
        self._device = device
        self._part = part
        self.place = place
        """Of memory that ranks share: a file that the system keeps while a process has it open."""
        if part is None:
            # zeroed by the system, and taken only once it is written
            self._slots = np.zeros((num_slots, page_bytes), dtype=np.uint8)
        else:
            self._slots = self._shared(num_slots * page_bytes).reshape(num_slots, page_bytes)
        self._streams = threading.local()
        if device.type == "cuda":
            # torch's own pinned memory would be rounded up to a power of two
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self._slots.ctypes.data, self._slots.nbytes, 0))

    def _shared(self, size: int) -> npt.NDArray[np.uint8]:
        file = os.memfd_create("treeline pages") if self.place is None else os.open(self.place, os.O_RDWR)
        self._file = os.fdopen(file, "r+b", buffering=0)  # closed with this object, if the rest fails
        if self.place is None:
            self._file.truncate(size)
            self.place = f"/proc/{os.getpid()}/fd/{file}"
        return np.frombuffer(mmap.mmap(file, size), dtype=np.uint8)

    def page(self, slot: int) -> npt.NDArray[np.uint8]:
        """(bytes of a page,), not a copy."""
        return self._slots[slot]

    def runs(self, slots: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
        """Their pages in parts (pages, this rank's bytes of a page), one for each run of consecutive slots; not
        copies."""
        if self._part is not None:
            return [self._slots[slot : slot + 1, self._part] for slot in slots]
        bounds = [i for i in range(1, len(slots)) if slots[i] != slots[i - 1] + 1]
        pairs = zip([0, *bounds], [*bounds, len(slots)], strict=True)
        return [self._slots[slots[begin] : slots[end - 1] + 1] for begin, end in pairs]

    def close(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.cudart().cudaHostUnregister(self._slots.ctypes.data)
        if self._part is not None:
            self._file.close()

    # ---- copies, in any thread ----------------------------------------------------------------------------

    def now(self) -> torch.cuda.Event | None:
        """What the device has been told to do so far; None on a CPU, where all of it is done."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def copying(self, after: torch.cuda.Event | None = None) -> Iterator[None]:
        """A context manager for copies between slots and a pool: they begin after `after`, run on a stream of this
        thread, and are complete at its end, also at an error."""
        if self._device.type != "cuda":
            yield
            return
        with torch.inference_mode(), torch.cuda.device(self._device):
            if not hasattr(self._streams, "own"):
                self._streams.own = torch.cuda.Stream()
            stream: torch.cuda.Stream = self._streams.own
            with torch.cuda.stream(stream):
                if after is not None:
                    stream.wait_event(after)
                try:
                    yield
                finally:
                    stream.synchronize()
