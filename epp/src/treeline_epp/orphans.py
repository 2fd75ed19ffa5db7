"""Blocks whose parent nobody is known to hold: kept until the parent comes, so that order of arrival does not matter.

An event gives the text of its own blocks only, so a run can be placed in the tree only below a placed parent. Late
joins, gaps and engines that drop ancestors first make orphans; when the parent is stored by any pod they are grafted.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from treeline_wire.events import BlockStored
from treeline_wire.keys import PrefixKeys

_Key = TypeVar("_Key")


@dataclass(eq=False, slots=True)
class OrphanRun:
    """A stored event that waits. `owner` is the pod's bit at the time; `gone` are blocks removed since."""

    owner: int
    event: BlockStored
    keys: PrefixKeys | None
    gone: set[int] = field(default_factory=set)


class Orphans:
    """The waiting runs of one tree, at most `max_blocks` blocks of them; the oldest are given up first."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.blocks = 0
        self.dropped_blocks = 0
        self._runs: OrderedDict[OrphanRun, None] = OrderedDict()
        self._waiting: dict[int, list[OrphanRun]] = {}
        self._by_block: dict[tuple[int, int], list[OrphanRun]] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, run: OrphanRun) -> None:
        """Keep a run whose event has a parent. O(blocks)."""
        parent = run.event.parent_block_hash
        assert parent is not None
        self._runs[run] = None
        self._waiting.setdefault(parent, []).append(run)
        for block in run.event.block_hashes:
            self._by_block.setdefault((run.owner, block), []).append(run)
        self.blocks += len(run.event.block_hashes)
        while self.blocks > self.max_blocks:
            oldest = next(iter(self._runs))
            self.dropped_blocks += len(oldest.event.block_hashes)
            self._forget(oldest)

    def take(self, parents: Iterable[int]) -> list[OrphanRun]:
        """Remove and return the runs that wait for any of `parents`. O(parents)."""
        waiting = self._waiting
        ready = [run for parent in parents if parent in waiting for run in waiting[parent]]
        for run in ready:
            self._forget(run)
        return ready

    def remove(self, owners: Iterable[int], block: int) -> bool:
        """The pod (its bits) no longer holds an orphan block. False if it is not known to have held it. O(1)."""
        found = False
        for run in [run for owner in owners for run in self._by_block.get((owner, block), ())]:
            if block not in run.gone:
                run.gone.add(block)
                found = True
                if len(run.gone) == len(run.event.block_hashes):
                    self._forget(run)
        return found

    def held_by(self, owner: int) -> set[int]:
        """All orphan blocks of a pod. O(runs)."""
        return {
            block
            for run in self._runs
            if run.owner == owner
            for block in run.event.block_hashes
            if block not in run.gone
        }

    def forget(self, owner: int) -> None:
        """Drop all runs of a pod. O(runs)."""
        for run in [run for run in self._runs if run.owner == owner]:
            self._forget(run)

    def _forget(self, run: OrphanRun) -> None:
        del self._runs[run]
        parent = run.event.parent_block_hash
        assert parent is not None
        _discard(self._waiting, parent, run)
        for block in run.event.block_hashes:
            _discard(self._by_block, (run.owner, block), run)
        self.blocks -= len(run.event.block_hashes)

    def check(self) -> None:
        """Assert what always holds."""
        assert self.blocks == sum(len(run.event.block_hashes) for run in self._runs)
        assert self.blocks <= self.max_blocks
        assert {run for runs in self._waiting.values() for run in runs} == set(self._runs)
        assert {run for runs in self._by_block.values() for run in runs} == set(self._runs)
        assert all(len(run.gone) < len(run.event.block_hashes) for run in self._runs)


def _discard(where: dict[_Key, list[OrphanRun]], key: _Key, run: OrphanRun) -> None:
    runs = where[key]
    runs.remove(run)
    if not runs:
        del where[key]
