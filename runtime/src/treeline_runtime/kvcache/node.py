"""Nodes of the radix tree: where their pages are, and their order of eviction."""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable

from treeline_runtime.kvcache.pool import NO_PAGES, Pages


class Place(enum.Enum):
    """The place of a node's keys and values. No descendant of a node that is not on the device is on the device."""

    DEVICE = enum.auto()
    """In the node's pages of the pool."""
    ON_ITS_WAY = enum.auto()
    """Being filled: holders of its lock are computing or loading it. It has no pages or digests, and leaves the tree
    with its last lock."""


class Node:
    """A run of whole pages in one place. Roots have an empty run, no parent, and are never evicted."""

    __slots__ = (
        "children",
        "digests",
        "hit_count",
        "key",
        "last_access",
        "lock_ref",
        "pages",
        "parent",
        "place",
        "priority",
    )

    def __init__(self, parent: Node | None, key: bytes, now: int, place: Place = Place.ON_ITS_WAY) -> None:
        self.parent = parent
        self.key = key
        self.place = place
        self.pages: Pages = NO_PAGES
        self.digests: list[bytes] = []
        self.children: dict[bytes, Node] = {}
        self.lock_ref = 0
        self.hit_count = 0
        self.last_access = now
        self.priority = 0

    def __repr__(self) -> str:
        return f"Node({self.place.name}, {len(self.pages)} pages, {len(self.children)} children, {self.lock_ref} locks)"


EvictionKey = Callable[[Node], tuple[int, ...]]
"""The leaf with the smallest key is evicted first."""

EVICTION_POLICIES: dict[str, EvictionKey] = {
    "lru": lambda node: (node.last_access,),
    "lfu": lambda node: (node.hit_count, node.last_access),
    # of the most urgent request that used it
    "priority": lambda node: (node.priority, node.last_access),
}
"""Policies by name, for `SchedulerConfig.eviction_policy`."""


class EvictionQueue:
    """The evictable leaves, maintained incrementally.

    A heap with lazy deletion: an entry counts only if its serial is the node's newest, so add, discard and touch are
    O(log n). Stale entries are dropped when they outnumber live ones.
    """

    def __init__(self, key: EvictionKey) -> None:
        self._key = key
        self._serial = 0
        self._live: dict[Node, int] = {}
        self._heap: list[tuple[tuple[int, ...], int, Node]] = []

    def __contains__(self, node: Node) -> bool:
        return node in self._live

    def __len__(self) -> int:
        return len(self._live)

    def add(self, node: Node) -> None:
        """Adds an evictable leaf, or updates its key."""
        self._serial += 1
        self._live[node] = self._serial
        heapq.heappush(self._heap, (self._key(node), self._serial, node))
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = [entry for entry in self._heap if self._live.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def discard(self, node: Node) -> None:
        self._live.pop(node, None)

    def touch(self, node: Node) -> None:
        """The data of `node`'s key changed."""
        if node in self._live:
            self.add(node)

    def pop(self) -> Node | None:
        """Removes and returns the leaf to evict from next; None if no leaf can be evicted."""
        while self._heap:
            _, serial, node = heapq.heappop(self._heap)
            if self._live.get(node) == serial:
                del self._live[node]
                return node
        return None
