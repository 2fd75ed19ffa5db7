"""For the publisher's tests: a cache that changes at random, and a router that believes what it is told."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from treeline_runtime.messages import CacheEvent, Cleared, Removed, Stored
from treeline_wire.events import AllBlocksCleared, BlockRemoved, BlockStored

PAGE = 2


class Cutting:
    """A re-encoder that agrees up to a fixed position (or to the end of the prompt, if that is later)."""

    def __init__(self, at: int) -> None:
        self._at = at

    def agreed_len(self, ids: Sequence[int], sampled_from: int) -> int:
        return min(len(ids), max(self._at, sampled_from))


class Cache:
    """A tree of pages as a scheduler reports it: runs stored below a page, leaves removed, now and then a flush."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._next = 1
        self.pages: dict[int, int | None] = {}

    def step(self) -> list[CacheEvent]:
        return [self._event() for _ in range(self._rng.randint(1, 3))]

    def _event(self) -> CacheEvent:
        roll = self._rng.random()
        if roll < 0.02:
            self.pages.clear()
            return Cleared()
        if roll < 0.4 and self.pages:
            return self._evict()
        return self._store()

    def _store(self) -> Stored:
        parent = self._rng.choice([None, *self.pages])
        hashes = list(range(self._next, self._next + self._rng.randint(1, 4)))
        self._next += len(hashes)
        tokens = [self._rng.randrange(100) for _ in range(PAGE * len(hashes))]
        above = parent
        for block in hashes:
            self.pages[block] = above
            above = block
        return Stored(hashes, parent, tokens, None, self._rng.randint(0, len(tokens)))

    def _evict(self) -> Removed:
        gone: list[int] = []
        for _ in range(self._rng.randint(1, 3)):
            leaves = sorted(set(self.pages) - set(self.pages.values()))  # type: ignore[arg-type]
            if leaves:
                gone.append(self._rng.choice(leaves))
                del self.pages[gone[-1]]
        return Removed(gone)


class Consumer:
    """Hash → (parent, tokens), from events alone."""

    def __init__(self) -> None:
        self.pages: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.orphans: list[int] = []

    def apply(self, events: Iterable[object]) -> None:
        for event in events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    for block in event.block_hashes:
                        del self.pages[block]
                case AllBlocksCleared():
                    self.pages.clear()

    def _store(self, event: BlockStored) -> None:
        parent, size = event.parent_block_hash, event.block_size
        for index, block in enumerate(event.block_hashes):
            if parent is not None and parent not in self.pages:
                self.orphans.append(block)
            self.pages[block] = (parent, tuple(event.token_ids[index * size : (index + 1) * size]))
            parent = block


class TrustingReencoder:
    """Takes every sampled token for what re-encoding gives."""

    def agreed_len(self, ids: Sequence[int], sampled_from: int) -> int:
        return len(ids)
