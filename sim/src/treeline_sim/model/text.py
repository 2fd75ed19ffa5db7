"""The prompts of simulated requests: blocks with chained hashes, and their tokens."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from typing import Protocol

import numpy as np

_VOCABULARY = 4096


class Prompt(Protocol):
    """A sequence of tokens as a cache sees it. `blocks` are the chained hashes (u64) of its whole blocks."""

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        ...

    @property
    def blocks(self) -> Sequence[int]:
        """The hashes of its whole blocks, each of which covers all tokens before it, too."""
        ...

    def ids(self, first: int, last: int, block_size: int) -> list[int]:
        """Return the token ids of the blocks from `first` to before `last`."""
        ...

    def extra_keys(self, first: int, last: int, block_size: int) -> list[list[object] | None] | None:
        """Return what an engine announces of these blocks besides their ids; None for texts."""
        ...


class Text:
    """Made-up text: token i of 4,096 is written as the four hexadecimal digits of its two bytes, so that a text, its
    tokens and its prefix key are three views of the same bytes, and a token has four bytes of text as in English.
    Immutable; `extended` shares the hashes of its beginning.
    """

    __slots__ = ("_raw", "block_size", "blocks")

    def __init__(self, block_size: int, raw: bytes = b"", before: tuple[int, ...] = ()) -> None:
        """Make a text; `before` are the hashes of the first blocks of `raw`, if they are known."""
        self.block_size = block_size
        self._raw = raw
        width = 2 * block_size
        hashes = list(before)
        parent = hashes[-1] if hashes else 0
        for start in range(len(hashes) * width, len(raw) - width + 1, width):
            digest = blake2b(raw[start : start + width], digest_size=8, key=parent.to_bytes(8, "big")).digest()
            parent = int.from_bytes(digest, "big")
            hashes.append(parent)
        self.blocks = tuple(hashes)

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return len(self._raw) // 2

    @property
    def key(self) -> bytes:
        """The prefix key: four bytes for each token."""
        return self._raw.hex().encode()

    def extended(self, tokens: int, rng: random.Random) -> Text:
        """Return this text with random tokens after it. O(bytes) at memory speed, and a hash for each new block."""
        return Text(self.block_size, self._raw + random_tokens(tokens, rng), self.blocks)

    def joined(self, other: Text) -> Text:
        """Return this text with another after it."""
        return Text(self.block_size, self._raw + other._raw, self.blocks)

    def ids(self, first: int, last: int, block_size: int) -> list[int]:
        """Return the token ids of some of its blocks."""
        width = 2 * block_size
        return memoryview(self._raw[first * width : last * width]).cast("H").tolist()

    def extra_keys(self, first: int, last: int, block_size: int) -> list[list[object] | None] | None:
        """Return None."""
        return None


def random_tokens(count: int, rng: random.Random) -> bytes:
    """Return random tokens in `Text`'s form. They are among the first 4,096: the index looks each up in a table, which
    then stays in the CPU caches.
    """
    tokens = np.frombuffer(rng.randbytes(2 * count), np.uint16) & np.uint16(_VOCABULARY - 1)
    return tokens.tobytes()


@cache
def token_bytes() -> list[bytes]:
    """Return the bytes of each token of `Text`, as a tokenizer's table
    (`treeline_wire.keys.PrefixKeys.token_bytes`).
    """
    return [token.to_bytes(2, sys.byteorder).hex().encode() for token in range(_VOCABULARY)]
