"""The paged KV pool and its radix cache, which also knows pages that are being filled."""

from treeline_runtime.kvcache.keys import TOKEN_BYTES, common_prefix, key_of, salted_key_of, tokens_of
from treeline_runtime.kvcache.node import Node, Place
from treeline_runtime.kvcache.pool import NO_PAGES, KVPool, PagePool, Pages
from treeline_runtime.kvcache.radix import NO_MATCH, Match, RadixCache

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
    "salted_key_of",
    "tokens_of",
]
