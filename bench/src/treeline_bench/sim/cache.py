"""What a simulated engine holds, and the KV events that say so: pure, no sockets.

The cache never evicts. Every change becomes one batch with the next `seq`, kept for replays.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import islice

from treeline_wire.events import BlockStored, block_hash, encode_batch, hash_of, root_digest
from treeline_wire.frames import (
    Hello,
    HelloRequest,
    ReplayEnd,
    ReplayItem,
    ReplayRequest,
    Reply,
    Request,
    SnapshotChunk,
    SnapshotEnd,
    SnapshotHeader,
    SnapshotRequest,
)

CHUNK_BLOCKS = 512
MEDIUM = "GPU"


class SimCache:
    """Blocks of `block_size` tokens, chained by SHA-256 as the runtime's are."""

    def __init__(self, block_size: int, epoch: int) -> None:
        self.block_size = block_size
        self.epoch = epoch
        # digest of a block → digest of its parent, its tokens; a block's parent is always inserted before it.
        self._blocks: dict[bytes, tuple[bytes, list[int]]] = {}
        self._payloads: list[bytes] = []

    @property
    def seq(self) -> int:
        """Of the newest batch; -1 before the first."""
        return len(self._payloads) - 1

    @property
    def blocks(self) -> int:
        return len(self._blocks)

    def matched_tokens(self, ids: Sequence[int]) -> int:
        """How many tokens of a prompt come from the cache: whole blocks, never the last token. O(tokens)."""
        matched = 0
        for digest, _, tokens in self._chain(ids):
            if digest not in self._blocks:
                break
            matched += len(tokens)
        return min(matched, (len(ids) - 1) // self.block_size * self.block_size)

    def store(self, ids: Sequence[int]) -> tuple[int, bytes] | None:
        """Hold a prompt's whole blocks. Returns (seq, payload) of the batch to publish, None if nothing was new."""
        fresh = [link for link in self._chain(ids) if link[0] not in self._blocks]
        if not fresh:
            return None
        for digest, parent, tokens in fresh:
            self._blocks[digest] = (parent, tokens)
        event = BlockStored(
            block_hashes=[hash_of(digest) for digest, _, _ in fresh],
            parent_block_hash=_hash_or_none(fresh[0][1]),
            token_ids=[token for _, _, tokens in fresh for token in tokens],
            block_size=self.block_size,
            medium=MEDIUM,
        )
        payload = encode_batch(time.time(), [event])
        self._payloads.append(payload)
        return self.seq, payload

    def reply(self, request: Request, topic: bytes) -> Iterator[Reply]:
        """What the ROUTER socket answers, message by message."""
        match request:
            case HelloRequest():
                held = (0, self.seq) if self._payloads else (None, None)
                yield Hello(self.epoch, *held)
            case ReplayRequest(start_seq=start):
                for seq in range(start, len(self._payloads)):
                    yield ReplayItem(topic, seq, self._payloads[seq])
                yield ReplayEnd()
            case SnapshotRequest():
                yield SnapshotHeader(self.epoch, self.seq, len(self._blocks))
                links = iter(list(self._blocks.items()))
                while chunk := list(islice(links, CHUNK_BLOCKS)):
                    yield SnapshotChunk([self._event(digest, *link) for digest, link in chunk])
                yield SnapshotEnd()

    def _event(self, digest: bytes, parent: bytes, tokens: list[int]) -> BlockStored:
        return BlockStored([hash_of(digest)], _hash_or_none(parent), tokens, self.block_size, medium=MEDIUM)

    def _chain(self, ids: Sequence[int]) -> Iterator[tuple[bytes, bytes, list[int]]]:
        """(digest, parent's digest, tokens) of each whole block of a prompt."""
        parent = root_digest(None)
        for start in range(0, len(ids) - self.block_size + 1, self.block_size):
            tokens = list(ids[start : start + self.block_size])
            digest = block_hash(parent, tokens)
            yield digest, parent, tokens
            parent = digest


def _hash_or_none(digest: bytes) -> int | None:
    return hash_of(digest) if digest else None
