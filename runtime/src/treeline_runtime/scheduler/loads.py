"""Pages on their way from the host or the disk to the device: one owner for each load, until nothing writes any more.

A load takes pages of the pool, marks what they will hold as being filled (so that requests which begin with it wait
while others are computed), and gives the pages to a copy. Then:

    READING ──arrived──▶ ENDED       what is good is in the tree, the rest of the pages is free
       │                   ▲
    give_up             arrived      all pages are free
       ▼                   │
    ABANDONED ─────────────┘         nobody waits any more, but a copy may still write: the pages stay taken

An abort of the waiting requests changes nothing: what arrives is cached. Flush, sleep and new weights are refused while
a load has not ended, and so no page changes its owner under a copy. A request loads once each time it is queued, and
computes whatever is missing then: so it ends, whatever happens to loads.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from treeline_runtime.core import Req
from treeline_runtime.kvcache import TOKEN_BYTES, Match, Node, PagePool, Pages, RadixCache
from treeline_runtime.kvcache.store import Reading

STALLED_S = 5.0
"""A load that gets no page for so long is given up: its requests compute."""


class LoadState(enum.Enum):
    READING = enum.auto()
    ABANDONED = enum.auto()
    ENDED = enum.auto()


TRANSITIONS = {
    (LoadState.READING, "arrived"): LoadState.ENDED,
    (LoadState.READING, "give_up"): LoadState.ABANDONED,
    (LoadState.ABANDONED, "arrived"): LoadState.ENDED,
}


@dataclass(slots=True, eq=False)
class Load:
    """The pages after the first `start` ones of a key."""

    req: Req
    """It began the load; it may have ended since."""
    key: bytes
    start: int
    pages: Pages
    handle: Node | None
    """Its lock on what was there before, and on what it fills."""
    reading: Reading
    began_at: float
    """In seconds of `time.perf_counter`."""
    moved_at: float
    """When its last page came, by the scheduler's clock."""
    progress: int = 0
    """Pages that had come by then."""
    state: LoadState = LoadState.READING

    def move(self, event: str) -> None:
        self.state = TRANSITIONS[self.state, event]


Start = Callable[[Req, Sequence[bytes], Pages, Callable[[Reading], None]], Reading | None]
"""Begins to copy pages by digest to pages of the device, for a request; see `PageStore.get`."""


class Loads:
    """Owns all loads and their pages. `start`: the copy; `ended`: called with each load that has arrived, and the
    seconds that it took."""

    def __init__(self, tree: RadixCache, pool: PagePool, start: Start, ended: Callable[[Load, float], None]) -> None:
        self._tree = tree
        self._pool = pool
        self._start = start
        self._ended = ended
        self._loads: list[Load] = []

    def __len__(self) -> int:
        return len(self._loads)

    @property
    def held_pages(self) -> int:
        return sum(len(load.pages) for load in self._loads)

    @property
    def is_expecting(self) -> bool:
        """Whether pages will come soon, or be free again."""
        return any(load.state is LoadState.READING for load in self._loads)

    def begin(self, req: Req, match: Match, digests: Sequence[bytes], now: float) -> bool:
        """Loads the pages after a fresh match of a waiting request; the caller checked that they fit. False: there is
        no slot for them now."""
        tree, start = self._tree, match.num_pages
        handle = tree.lock(match, req.priority)
        shortage = len(digests) - self._pool.num_free
        if shortage > 0:
            self._pool.free(tree.evict(shortage))
        pages = self._pool.alloc(len(digests))
        reading = self._start(req, digests, pages, lambda _: self._arrived(load))
        if reading is None:
            self._pool.free(pages)
            tree.unlock(handle)
            return False
        key = req.key[: (start + reading.wanted) * tree.page_size * TOKEN_BYTES]
        handle = tree.begin_filling(handle, key, req.namespace)
        load = Load(req, key, start, pages, handle, reading, time.perf_counter(), now)
        self._loads.append(load)
        return True

    def check(self, now: float) -> bool:
        """Gives up loads that are stalled. Returns whether there were any."""
        found = False
        for load in self._loads:
            if load.state is not LoadState.READING:
                continue
            if load.reading.progress > load.progress:
                load.progress, load.moved_at = load.reading.progress, now
            elif now - load.moved_at >= STALLED_S:
                self._give_up(load)
                found = True
        return found

    def _give_up(self, load: Load) -> None:
        load.move("give_up")
        load.reading.stop = True
        self._tree.unlock(load.handle)
        load.handle = None

    def _arrived(self, load: Load) -> None:
        """Nothing writes to the load's pages any more."""
        was, count = load.state, load.reading.count
        load.move("arrived")
        self._loads.remove(load)
        if was is LoadState.ABANDONED:
            self._pool.free(load.pages)
            load.reading.count = 0
            self._ended(load, time.perf_counter() - load.began_at)
            return
        duplicates = 0
        if count:
            size = self._tree.page_size * TOKEN_BYTES
            existing, _ = self._tree.insert(
                load.key[: (load.start + count) * size],
                np.concatenate([np.zeros(load.start, dtype=np.int64), load.pages[:count]]),
                prompt_tokens=load.req.prompt_len,
                namespace=load.req.namespace,
                priority=load.req.priority,
            )
            duplicates = existing - load.start
            assert duplicates >= 0, "locked pages left the tree under a load"
        self._pool.free(np.concatenate([load.pages[:duplicates], load.pages[count:]]))
        self._tree.unlock(load.handle)
        self._ended(load, time.perf_counter() - load.began_at)
