"""The paged KV pool and the radix cache over it."""

from treeline_runtime.kvcache.eviction import EVICTION_POLICIES
from treeline_runtime.kvcache.node import Node
from treeline_runtime.kvcache.pool import NO_PAGES, KVPool, PagePool, Pages
from treeline_runtime.kvcache.radix import Match, RadixCache, key_of
from treeline_runtime.kvcache.whole_prompts import WholePrompts

__all__ = [
    "EVICTION_POLICIES",
    "NO_PAGES",
    "KVPool",
    "Match",
    "Node",
    "PagePool",
    "Pages",
    "RadixCache",
    "WholePrompts",
    "key_of",
]
