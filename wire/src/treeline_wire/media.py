"""Images, videos and sound in prompts: their digests, and the token ids that stand for them.

An item is a run of `count` placeholder tokens in a prompt. In cache keys and KV events their ids spell the item, so
that two items of one size never share pages and the same one does, in runtime and picker alike, without decoding it:

    count | word 0 | ... | word 7 | count | word 0 | ...

All of these ids are at least `FIRST_ID`, above every vocabulary: the count has its two highest bits set, the eight
words the highest only, and each has 30 bits of the digest. The cycle repeats, so any run of 17 of them names item and
count.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import Final

DIGEST_BYTES: Final = 30
FIRST_ID: Final = 1 << 31
"""The least id of an item's tokens."""
_COUNT: Final = 3 << 30
_LOW: Final = (1 << 30) - 1
_WORDS: Final = 8
MAX_COUNT: Final = _LOW


def item_digest(kind: str, data: bytes | bytearray | memoryview, processor: str) -> bytes:
    """The identity of an item: of its bytes as they were sent, and of the processor that reads them. O(len(data)),
    without holding the interpreter for long data."""
    made = hashlib.sha256(f"{len(kind)}:{kind}{len(processor)}:{processor}".encode())
    made.update(data)
    return made.digest()[:DIGEST_BYTES]


def item_ids(digest: bytes, count: int) -> list[int]:
    """The ids of an item's `count` tokens."""
    number = int.from_bytes(digest, "big")
    words = [FIRST_ID | number >> 30 * (_WORDS - 1 - i) & _LOW for i in range(_WORDS)]
    return list(itertools.islice(itertools.cycle([_COUNT | count, *words]), count))


def counts_in(ids: Sequence[int]) -> dict[bytes, int]:
    """The items of which `ids` has a whole cycle, by digest, with their counts. Ids of a peer may spell anything."""
    found: dict[bytes, int] = {}
    at, end = 0, len(ids) - _WORDS
    while at < end:
        if ids[at] < _COUNT:
            at += 1
            continue
        words = ids[at + 1 : at + 1 + _WORDS]
        if all(FIRST_ID <= word < _COUNT for word in words):
            number = 0
            for word in words:
                number = number << 30 | word & _LOW
            found[number.to_bytes(DIGEST_BYTES, "big")] = ids[at] & _LOW
        at += 1 + _WORDS
    return found
