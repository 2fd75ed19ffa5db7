"""Blocks whose parent nobody is known to hold: kept until the parent comes, so that order of arrival does not matter.

An event gives the text of its own blocks only, so it can be placed in the tree only below a placed parent. Late
joins, gaps and engines that drop ancestors first make orphans; when the parent is stored by any pod they are grafted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from treeline_wire.events import BlockStored
from treeline_wire.keys import PrefixKeys

_Key = TypeVar("_Key")
_MOST_COPIES = 64
"""Of one block of one pod. An engine may announce it as often as it likes, and each removal looks at them all."""


@dataclass(eq=False, slots=True)
class Orphan:
    """A stored event that waits. `owner` is the pod's bit at the time; `gone` are blocks removed since."""

    owner: int
    event: BlockStored
    keys: PrefixKeys | None
    gone: set[int] = field(default_factory=set)


class Orphans:
    """The orphans of one tree, at most `max_blocks` blocks of them; the oldest are given up first."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.blocks = 0
        self.dropped_blocks = 0
        self._orphans: OrderedDict[Orphan, None] = OrderedDict()
        self._waiting: dict[int, list[Orphan]] = {}
        self._by_block: dict[tuple[int, int], list[Orphan]] = {}

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
        self._waiting.setdefault(parent, []).append(orphan)
        for block in orphan.event.block_hashes:
            self._by_block.setdefault((orphan.owner, block), []).append(orphan)
        self.blocks += len(orphan.event.block_hashes)
        while self.blocks > self.max_blocks:
            oldest = next(iter(self._orphans))
            self.dropped_blocks += len(oldest.event.block_hashes)
            self._forget(oldest)

    def take(self, parents: Iterable[int]) -> list[Orphan]:
        """Remove and return the orphans that wait for any of `parents`. O(parents)."""
        waiting = self._waiting
        ready = [orphan for parent in parents if parent in waiting for orphan in waiting[parent]]
        for orphan in ready:
            self._forget(orphan)
        return ready

    def remove(self, owners: Iterable[int], block: int) -> bool:
        """The pod (its bits) no longer holds one copy of an orphan block, of as many as it has announced. False if it
        is not known to have held it. O(1)."""
        for orphan in [orphan for owner in owners for orphan in self._by_block.get((owner, block), ())]:
            if block not in orphan.gone:
                orphan.gone.add(block)
                if len(orphan.gone) == len(orphan.event.block_hashes):
                    self._forget(orphan)
                return True
        return False

    def held_by(self, owner: int) -> set[int]:
        """All orphan blocks of a pod. O(orphans)."""
        return {
            block
            for orphan in self._orphans
            if orphan.owner == owner
            for block in orphan.event.block_hashes
            if block not in orphan.gone
        }

    def forget(self, owner: int) -> None:
        """Drop all orphans of a pod. O(orphans)."""
        for orphan in [orphan for orphan in self._orphans if orphan.owner == owner]:
            self._forget(orphan)

    def _forget(self, orphan: Orphan) -> None:
        del self._orphans[orphan]
        parent = orphan.event.parent_block_hash
        assert parent is not None
        _discard(self._waiting, parent, orphan)
        for block in orphan.event.block_hashes:
            _discard(self._by_block, (orphan.owner, block), orphan)
        self.blocks -= len(orphan.event.block_hashes)

    def check(self) -> None:
        """Assert what always holds."""
        assert self.blocks == sum(len(orphan.event.block_hashes) for orphan in self._orphans)
        assert self.blocks <= self.max_blocks
        assert {orphan for orphans in self._waiting.values() for orphan in orphans} == set(self._orphans)
        assert {orphan for orphans in self._by_block.values() for orphan in orphans} == set(self._orphans)
        assert all(len(orphan.gone) < len(orphan.event.block_hashes) for orphan in self._orphans)


def _discard(where: dict[_Key, list[Orphan]], key: _Key, orphan: Orphan) -> None:
    orphans = where[key]
    orphans.remove(orphan)
    if not orphans:
        del where[key]
