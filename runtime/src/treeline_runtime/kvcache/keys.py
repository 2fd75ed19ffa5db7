"""Keys of token sequences in the radix cache, page after page."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

TOKEN_BYTES = 4
SALT_WORDS = 8
"""So many u32 follow a page's tokens in the keys of a tree that is salted."""


def key_of(tokens: list[int]) -> bytes:
    """Token ids as a cache key."""
    return np.asarray(tokens, dtype="<u4").tobytes()


def salted_key_of(tokens: list[int], page_size: int, items: Iterable[tuple[int, bytes]]) -> bytes:
    """The same for a tree that is salted, of whole pages. items: the first token and the digest of each item.

    Few ids of an item, of all that a page has, spell few bits of its digest. So where items begin in a page, its salt
    is a hash of their digests; later pages have what is before them. Else it is zero."""
    pages = len(tokens) // page_size
    key = np.zeros((pages, page_size + SALT_WORDS), dtype="<u4")
    key[:, :page_size] = np.asarray(tokens[: pages * page_size]).reshape(pages, page_size)
    for start, digest in items:
        if (page := start // page_size) < pages:
            salt = key[page, page_size:]
            salt[:] = np.frombuffer(hashlib.sha256(salt.tobytes() + digest).digest(), dtype="<u4")
    return key.tobytes()


def tokens_of(key: bytes) -> list[int]:
    return np.frombuffer(key, dtype="<u4").tolist()


def common_prefix(a: bytes, b: bytes) -> int:
    """Length in bytes of the common prefix. O(length) memcmp, by a doubling and then a halving search."""
    limit = min(len(a), len(b))
    if a[:limit] == b[:limit]:
        return limit
    low, step = 0, 64
    while a[low : low + step] == b[low : low + step]:
        low += step
        step *= 2
    high = min(low + step, limit)
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
