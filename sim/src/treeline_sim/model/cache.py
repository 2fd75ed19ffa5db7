"""A paged KV cache: blocks by hash, counted references, and the least recently used evicted. Pure.

As in vLLM (`vllm/v1/core/block_pool.py`) a block without references stays until its room is needed, and a request's
blocks are given back last one first, so that a prefix outlives what came after it.

    capacity = free + private + cached,    cached = referenced + evictable

`private` blocks are in use and have no name yet: they are being computed, or are not full.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice


class PagedCache:
    """Blocks of `block_size` tokens, `capacity` of them. All methods are O(blocks that they are given)."""

    def __init__(self, block_size: int, capacity: int) -> None:
        if block_size < 1 or capacity < 1:
            raise ValueError(f"a cache needs blocks: {capacity} of {block_size} tokens")
        self.block_size = block_size
        self.capacity = capacity
        self.private = 0
        self.evicted = 0
        """Blocks that were, ever."""
        self._references: dict[int, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def cached(self) -> int:
        """Blocks that have a name."""
        return len(self._references)

    @property
    def evictable(self) -> int:
        """Cached blocks without a reference."""
        return len(self._evictable)

    @property
    def room(self) -> int:
        """Blocks that `take` could give: free ones and evictable ones."""
        return self.capacity - self.private - len(self._references) + len(self._evictable)

    def __contains__(self, block: int) -> bool:
        return block in self._references

    def matched(self, blocks: Sequence[int]) -> int:
        """How many of the first blocks are held."""
        references = self._references
        for at, block in enumerate(blocks):
            if block not in references:
                return at
        return len(blocks)

    def unused(self, blocks: Iterable[int]) -> int:
        """How many of these held blocks are evictable: they take room from others once they are used."""
        return sum(1 for block in blocks if block in self._evictable)

    def use(self, blocks: Iterable[int]) -> None:
        """Count a reference to each of these held blocks."""
        references, evictable = self._references, self._evictable
        for block in blocks:
            if not references[block]:
                del evictable[block]
            references[block] += 1

    def take(self, count: int) -> list[int]:
        """Make so many blocks private; returns those that were evicted for it. Needs `room`."""
        assert count <= self.room, (count, self.room)
        over = count - (self.capacity - self.private - len(self._references))
        gone = list(islice(self._evictable, over)) if over > 0 else []
        for block in gone:
            del self._evictable[block], self._references[block]
        self.evicted += len(gone)
        self.private += count
        return gone

    def name(self, blocks: Sequence[int]) -> list[int]:
        """Private blocks are computed and have these names now, with a reference each. Returns those that are new: a
        name that another request has brought meanwhile is used, and the block of that is free again."""
        references, evictable = self._references, self._evictable
        new: list[int] = []
        self.private -= len(blocks)
        for block in blocks:
            known = references.get(block)
            if known is None:
                references[block] = 1
                new.append(block)
            else:
                if not known:
                    del evictable[block]
                references[block] = known + 1
        return new

    def give(self, blocks: Sequence[int], private: int = 0) -> None:
        """A request has done with these: references, the last block first, and private blocks."""
        references, evictable = self._references, self._evictable
        for block in reversed(blocks):
            left = references[block] - 1
            references[block] = left
            if not left:
                evictable[block] = None
        self.private -= private

    def check(self) -> None:
        """Assert what always holds."""
        unused = {block for block, count in self._references.items() if not count}
        assert unused == set(self._evictable), (unused, self._evictable)
        assert all(count >= 0 for count in self._references.values())
        assert self.private >= 0
        assert self.private + len(self._references) <= self.capacity
