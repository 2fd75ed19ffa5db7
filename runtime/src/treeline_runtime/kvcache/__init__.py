"""The paged KV pool and the radix cache over it."""

from treeline_runtime.kvcache.eviction import Node
from treeline_runtime.kvcache.pool import NO_PAGES, KVPool, PagePool, Pages
from treeline_runtime.kvcache.radix import Match, RadixCache, key_of

__all__ = [
    "NO_PAGES",
    "KVPool",
    "Match",
    "Node",
    "PagePool",
    "Pages",
    "RadixCache",
    "key_of",
]
