"""Pages on their way from the host to the device: one owner, until nothing writes to them any more.

A load takes pages of the pool, marks what they will hold as being filled (so that requests which begin with it wait
while others are computed), and gives the pages to a copy. When that ends, what is good enters the tree, and the rest of
the pages is free. A copy of memory always ends soon, so a load is never given up: it changes nothing that its request
is aborted. Flush, sleep and new weights wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from treeline_runtime.core import Req
from treeline_runtime.kvcache import Match, Node, PagePool, Pages, RadixCache
from treeline_runtime.kvcache.store import Moved


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """The pages after the first `start` ones of a key."""

    req: Req
    """It began the load; it may have ended since."""
    key: bytes
    start: int
    pages: Pages
    handle: Node | None
    """Its lock on what was there before, and on what it fills."""


Start = Callable[[Sequence[bytes], Pages, Callable[[Moved], None]], None]
"""Begins to copy pages by digest to pages of the device; see `PageStore.get`."""


class Loads:
    """Owns all loads and their pages. `start`: the copy; `ended`: called with each load that has arrived."""

    def __init__(self, tree: RadixCache, pool: PagePool, start: Start, ended: Callable[[Load, Moved], None]) -> None:
        self._tree = tree
        self._pool = pool
        self._start = start
        self._ended = ended
        self._loads: dict[Load, None] = {}

    @property
    def reqs(self) -> list[Req]:
        """The requests that have begun them."""
        return [load.req for load in self._loads]

    @property
    def held_pages(self) -> int:
        return sum(len(load.pages) for load in self._loads)

    def begin(self, req: Req, match: Match, digests: Sequence[bytes]) -> None:
        """Loads the pages after a fresh match of a waiting request; the caller checked that they fit."""
        tree, start = self._tree, match.num_pages
        handle = tree.lock(match, req.priority)
        shortage = len(digests) - self._pool.num_free
        if shortage > 0:
            self._pool.free(tree.evict(shortage))
        key = req.key[: (start + len(digests)) * tree.page_bytes]
        handle = tree.begin_filling(handle, key, req.namespace)
        load = Load(req, key, start, self._pool.alloc(len(digests)), handle)
        self._loads[load] = None
        self._start(digests, load.pages, lambda moved: self._arrived(load, moved))

    def _arrived(self, load: Load, moved: Moved) -> None:
        del self._loads[load]
        count, duplicates = moved.pages, 0
        if count:
            existing, _ = self._tree.insert(
                load.key[: (load.start + count) * self._tree.page_bytes],
                np.concatenate([np.zeros(load.start, dtype=np.int64), load.pages[:count]]),
                prompt_tokens=load.req.prompt_len,
                namespace=load.req.namespace,
                priority=load.req.priority,
            )
            duplicates = existing - load.start
            assert duplicates >= 0, "locked pages left the tree under a load"
        self._pool.free(np.concatenate([load.pages[:duplicates], load.pages[count:]]))
        self._tree.unlock(load.handle)
        self._ended(load, moved)
