"""A paged KV cache: blocks by hash, reference counts, eviction of the least recently used. Pure.

As in vLLM (`vllm/v1/core/block_pool.py`) a block without references stays until its room is needed, and a request's
blocks are released last one first, so that a prefix outlives its continuation.

    capacity = free + private + cached,    cached = referenced + evictable

`private` blocks are in use and have no hash yet: they are being computed, or are not full.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice


class PagedCache:
    """A cache of `capacity` blocks of `block_size` tokens. All methods are O(given blocks)."""

    def __init__(self, block_size: int, capacity: int) -> None:
        if block_size < 1 or capacity < 1:
            raise ValueError(f"a cache needs blocks: {capacity} of {block_size} tokens")
        self.block_size = block_size
        self.capacity = capacity
        self.private = 0
        self.evicted = 0
        """Number of evictions so far."""
        self._references: dict[int, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def cached(self) -> int:
        """The number of blocks with a hash."""
        return len(self._references)

    @property
    def evictable(self) -> int:
        """The number of cached blocks without a reference."""
        return len(self._evictable)

    @property
    def room(self) -> int:
        """The number of blocks that `take` could give: free ones and evictable ones."""
        return self.capacity - self.private - len(self._references) + len(self._evictable)

    def __contains__(self, block: int) -> bool:
        return block in self._references

    def matched(self, blocks: Sequence[int]) -> int:
        """Return how many of the first blocks are cached."""
        references = self._references
        for at, block in enumerate(blocks):
            if block not in references:
                return at
        return len(blocks)

    def unused(self, blocks: Iterable[int]) -> int:
        """Return how many of these cached blocks are evictable: they take room from others once they are used."""
        return sum(1 for block in blocks if block in self._evictable)

    def use(self, blocks: Iterable[int]) -> None:
        """Count a reference to each of these cached blocks."""
        references, evictable = self._references, self._evictable
        for block in blocks:
            if not references[block]:
                del evictable[block]
            references[block] += 1

    def take(self, count: int) -> list[int]:
        """Make `count` blocks private; return the blocks evicted for them. Needs `room`."""
        assert count <= self.room, (count, self.room)
        over = count - (self.capacity - self.private - len(self._references))
        gone = list(islice(self._evictable, over)) if over > 0 else []
        for block in gone:
            del self._evictable[block], self._references[block]
        self.evicted += len(gone)
        self.private += count
        return gone

    def name(self, blocks: Sequence[int]) -> list[int]:
        """Give computed private blocks these hashes, with a reference each. Return the new ones: if another request has
        brought a hash meanwhile, that block is used, and this one is free again.
        """
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
        """Release a request's blocks: references, the last block first, and private blocks."""
        references, evictable = self._references, self._evictable
        for block in reversed(blocks):
            left = references[block] - 1
            references[block] = left
            if not left:
                evictable[block] = None
        self.private -= private

    def check(self) -> None:
        """Assert the invariants."""
        unused = {block for block, count in self._references.items() if not count}
        assert unused == set(self._evictable), (unused, self._evictable)
        assert all(count >= 0 for count in self._references.values())
        assert self.private >= 0
        assert self.private + len(self._references) <= self.capacity
