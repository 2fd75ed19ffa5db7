"""A node of the radix tree."""

from __future__ import annotations

from treeline_runtime.kvcache.pool import Pages


class Node:
    """One run of pages, all on the device. Roots have an empty run, no parent, and are never evicted."""

    __slots__ = (
        "children",
        "digests",
        "hit_count",
        "key",
        "last_access",
        "lock_ref",
        "pages",
        "parent",
        "priority",
    )

    def __init__(
        self, parent: Node | None, key: bytes, pages: Pages, digests: list[bytes], now: int, priority: int = 0
    ) -> None:
        self.parent = parent
        self.key = key
        self.pages = pages
        self.digests = digests
        self.children: dict[bytes, Node] = {}
        self.lock_ref = 0
        self.hit_count = 0
        self.last_access = now
        self.priority = priority

    def __repr__(self) -> str:
        return f"Node({len(self.pages)} pages, {len(self.children)} children, lock_ref={self.lock_ref})"
