"""Blocks whose parent no pod is known to hold: kept until the parent comes, so the order of arrival does not matter.

An event gives the text of its own blocks only, so it can be placed in the tree only below a placed parent. Late
joins, gaps and engines that drop ancestors first make orphans. When any pod stores the parent they are grafted, one
after the other: a parent may have tens of thousands of them, and each may be the parent of others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from treeline_wire.events import BlockStored
from treeline_wire.keys import PrefixKeys

_MOST_COPIES = 64
"""Most copies of one block of one pod. An engine may announce any number, and each removal searches them all."""


@dataclass(eq=False, slots=True)
class Orphan:
    """A stored event that waits. `owner` is the pod's bit at that time; `gone` are blocks removed since."""

    owner: int
    event: BlockStored
    keys: PrefixKeys | None
    gone: set[int] = field(default_factory=set)


class Orphans:
    """The orphans of one tree, at most `max_blocks` blocks of them; the oldest are dropped first."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.blocks = 0
        self.dropped_blocks = 0
        self._orphans: OrderedDict[Orphan, None] = OrderedDict()
        self._waiting: dict[int, dict[Orphan, None]] = {}
        self._by_block: dict[tuple[int, int], list[Orphan]] = {}
        self._of: dict[int, dict[Orphan, None]] = {}
        self._ready: dict[int, dict[Orphan, None]] = {}  # orphans whose parent has come

    def __len__(self) -> int:
        return len(self._orphans)

    def add(self, orphan: Orphan) -> None:
        """Keep an orphan whose event has a parent, unless there are too many of its blocks already. O(blocks)."""
        parent = orphan.event.parent_block_hash
        assert parent is not None
        copies = (self._by_block.get((orphan.owner, block), ()) for block in orphan.event.block_hashes)
        if any(len(each) >= _MOST_COPIES for each in copies):
            self.dropped_blocks += len(orphan.event.block_hashes)
            return
        self._orphans[orphan] = None
        self._waiting.setdefault(parent, {})[orphan] = None
        self._of.setdefault(orphan.owner, {})[orphan] = None
        for block in orphan.event.block_hashes:
            self._by_block.setdefault((orphan.owner, block), []).append(orphan)
        self.blocks += len(orphan.event.block_hashes)
        while self.blocks > self.max_blocks:
            oldest = next(iter(self._orphans))
            self.dropped_blocks += len(oldest.event.block_hashes)
            self._forget(oldest)

    def place(self, blocks: Iterable[int]) -> None:
        """Make the orphans ready that wait for these blocks, which have been placed. O(blocks)."""
        for block in blocks:
            orphans = self._waiting.pop(block, None)
            if orphans is None:
                continue
            if block in self._ready:  # the block came before, and went
                orphans |= self._ready[block]
            self._ready[block] = orphans

    @property
    def ready(self) -> bool:
        """Whether there are orphans whose parent has been placed."""
        return bool(self._ready)

    def take(self) -> Orphan | None:
        """Remove an orphan whose parent has been placed, and return it. O(blocks of it)."""
        if not self._ready:
            return None
        parent, orphans = self._ready.popitem()
        orphan, _ = orphans.popitem()
        if orphans:
            self._ready[parent] = orphans
        self._forget(orphan)
        return orphan

    def remove(self, owners: Iterable[int], block: int) -> bool:
        """Remove one copy of an orphan block from the pod (its bits), which may have announced several. Return False if
        it is not known to have held it. O(1).
        """
        for orphan in [orphan for owner in owners for orphan in self._by_block.get((owner, block), ())]:
            if block not in orphan.gone:
                orphan.gone.add(block)
                if len(orphan.gone) == len(orphan.event.block_hashes):
                    self._forget(orphan)
                return True
        return False

    def held_by(self, owner: int) -> set[int]:
        """Return all orphan blocks of a pod. O(orphans)."""
        return {
            block
            for orphan in self._of.get(owner, ())
            for block in orphan.event.block_hashes
            if block not in orphan.gone
        }

    def sweep(self, owners: int, budget: int) -> int:
        """Drop the next orphans of retired bits. Return the rest of the budget, of which a block takes one: above zero
        when no orphans are left.
        """
        for owner in [owner for owner in self._of if owner & owners]:
            orphans = self._of[owner]
            while orphans and budget > 0:
                orphan, _ = orphans.popitem()
                budget -= len(orphan.event.block_hashes)
                self._forget(orphan)
        return budget

    def _forget(self, orphan: Orphan) -> None:
        del self._orphans[orphan]
        parent = orphan.event.parent_block_hash
        assert parent is not None
        for where, key in ((self._waiting, parent), (self._ready, parent), (self._of, orphan.owner)):
            orphans = where.get(key)
            if orphans is not None:
                orphans.pop(orphan, None)
                if not orphans:
                    del where[key]
        for block in orphan.event.block_hashes:
            copies = self._by_block[orphan.owner, block]
            copies.remove(orphan)
            if not copies:
                del self._by_block[orphan.owner, block]
        self.blocks -= len(orphan.event.block_hashes)

    def check(self) -> None:
        """Assert the invariants."""
        assert self.blocks == sum(len(orphan.event.block_hashes) for orphan in self._orphans)
        assert self.blocks <= self.max_blocks
        waiting = [*self._waiting.values(), *self._ready.values()]
        assert {orphan for orphans in waiting for orphan in orphans} == set(self._orphans)
        assert {orphan for orphans in self._by_block.values() for orphan in orphans} == set(self._orphans)
        assert {orphan for orphans in self._of.values() for orphan in orphans} == set(self._orphans)
        assert all(len(orphan.gone) < len(orphan.event.block_hashes) for orphan in self._orphans)
