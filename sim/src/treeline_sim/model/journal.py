"""The publisher's side of an engine: batches of KV events in order, kept for replays, and a snapshot of the cache.
Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice

from treeline_wire.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch, encode_batch
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

from treeline_sim.model.text import Prompt

MEDIUM = "GPU"
CHUNK_BLOCKS = 512
RING = 1000
"""Batches that can be replayed. vLLM keeps 10,000, which for tens of engines in one process would be gigabytes."""


class Journal:
    """The journal of the process that `epoch` names. Stored and removed blocks are collected until `flush` makes a
    batch of them.
    """

    def __init__(self, block_size: int, epoch: int, ring: int = RING) -> None:
        self.block_size = block_size
        self.epoch = epoch
        self.seq = -1
        """The number of the newest batch."""
        self._ring: deque[EventBatch] = deque(maxlen=ring)
        self._pending: list[Event] = []
        self._held: dict[int, tuple[Prompt, int]] = {}

    def stored(self, prompt: Prompt, first: int, last: int, new: Iterable[int]) -> None:
        """Record that the `new` ones of a prompt's blocks from `first` to before `last` are cached now."""
        fresh, blocks, held = set(new), prompt.blocks, self._held
        at = first
        while at < last:
            if blocks[at] not in fresh:
                at += 1
                continue
            start = at
            while at < last and blocks[at] in fresh:
                held[blocks[at]] = (prompt, at)
                at += 1
            self._pending.append(_stored(prompt, start, at, self.block_size))

    def removed(self, blocks: list[int]) -> None:
        """Record evicted blocks."""
        if blocks:
            for block in blocks:
                del self._held[block]
            self._pending.append(BlockRemoved(blocks, medium=MEDIUM))

    def cleared(self) -> None:
        """Record that the cache was cleared."""
        self._held.clear()
        self._pending.append(AllBlocksCleared())

    def flush(self, now: float) -> tuple[int, EventBatch] | None:
        """Return the batch of changes since the last one, and its number; None without changes."""
        if not self._pending:
            return None
        batch = EventBatch(now, self._pending)
        self._pending = []
        self._ring.append(batch)
        self.seq += 1
        return self.seq, batch

    def reply(self, request: Request, topic: bytes = b"") -> Iterator[Reply]:
        """Yield the publisher's answer, message by message."""
        oldest = self.seq - len(self._ring) + 1
        match request:
            case HelloRequest():
                yield Hello(self.epoch, *((oldest, self.seq) if self._ring else (None, None)))
            case ReplayRequest(start_seq=start):
                for at in range(max(0, start - oldest), len(self._ring)):
                    batch = self._ring[at]
                    yield ReplayItem(topic, oldest + at, encode_batch(batch.ts, batch.events))
                yield ReplayEnd()
            case SnapshotRequest():
                yield SnapshotHeader(self.epoch, self.seq, len(self._held))
                places = iter(list(self._held.values()))
                while chunk := list(islice(places, CHUNK_BLOCKS)):
                    yield SnapshotChunk([_stored(prompt, at, at + 1, self.block_size) for prompt, at in chunk])
                yield SnapshotEnd()


def _stored(prompt: Prompt, first: int, last: int, block_size: int) -> BlockStored:
    return BlockStored(
        list(prompt.blocks[first:last]),
        prompt.blocks[first - 1] if first else None,
        prompt.ids(first, last, block_size),
        block_size,
        medium=MEDIUM,
        extra_keys=prompt.extra_keys(first, last, block_size),
    )
