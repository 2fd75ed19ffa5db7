"""The paged KV pool and its radix cache, which also knows pages that are being filled."""

from treeline_runtime.kvcache.node import Node, Place
from treeline_runtime.kvcache.pool import NO_PAGES, KVPool, PagePool, Pages
from treeline_runtime.kvcache.radix import NO_MATCH, TOKEN_BYTES, Match, RadixCache, common_prefix, key_of

__all__ = [
    "NO_MATCH",
    "NO_PAGES",
    "TOKEN_BYTES",
    "KVPool",
    "Match",
    "Node",
    "PagePool",
    "Pages",
    "Place",
    "RadixCache",
    "common_prefix",
    "key_of",
]
