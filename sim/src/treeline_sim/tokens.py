"""A prompt of real token ids, with our runtime's hashes of its blocks."""

from __future__ import annotations

from collections.abc import Sequence

from treeline_wire.events import block_hash, hash_of, root_digest


class TokenPrompt:
    """Token ids in blocks, chained by SHA-256. `extended` shares the hashes of its beginning."""

    __slots__ = ("_digest", "_ids", "block_size", "blocks")

    def __init__(self, ids: Sequence[int], block_size: int, before: TokenPrompt | None = None) -> None:
        """Make a prompt; `before` is a prompt with which these ids begin."""
        self._ids = list(ids)
        self.block_size = block_size
        blocks = list(before.blocks) if before is not None else []
        digest: bytes = before._digest if before is not None else root_digest(None)
        for start in range(len(blocks) * block_size, len(self._ids) - block_size + 1, block_size):
            digest = block_hash(digest, self._ids[start : start + block_size])
            blocks.append(hash_of(digest))
        self.blocks: tuple[int, ...] = tuple(blocks)
        self._digest: bytes = digest

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return len(self._ids)

    def extended(self, ids: Sequence[int]) -> TokenPrompt:
        """Return this prompt with these tokens after it."""
        return TokenPrompt([*self._ids, *ids], self.block_size, self)

    def ids(self, first: int, last: int, block_size: int) -> list[int]:
        """Return the token ids of some of its blocks."""
        return self._ids[first * block_size : last * block_size]

    def extra_keys(self, first: int, last: int, block_size: int) -> list[list[object] | None] | None:
        """Return None: they are texts."""
        return None
