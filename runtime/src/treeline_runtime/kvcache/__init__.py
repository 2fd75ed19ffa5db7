"""The paged KV pool, the radix cache over it, and what is on its way into it."""

from treeline_runtime.kvcache.filling import MIN_SHARED_TOKENS, Filling
from treeline_runtime.kvcache.node import Node
from treeline_runtime.kvcache.pool import NO_PAGES, KVPool, PagePool, Pages
from treeline_runtime.kvcache.radix import Match, RadixCache, key_of

__all__ = [
    "MIN_SHARED_TOKENS",
    "NO_PAGES",
    "Filling",
    "KVPool",
    "Match",
    "Node",
    "PagePool",
    "Pages",
    "RadixCache",
    "key_of",
]
