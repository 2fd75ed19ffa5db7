"""Decodes a publisher's messages, and splits batches into small pieces.

Pure. A large message is read in another thread, which also does the splitting and the freeing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Final, NamedTuple, TypeAlias

from msgspec.structs import replace
from treeline_wire import frames
from treeline_wire.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    DecodeError,
    DecodeReason,
    Event,
    EventBatch,
    decode_batch,
)
from treeline_wire.frames import Hello, ReplayEnd, ReplayItem, Reply, SnapshotChunk, SnapshotEnd, SnapshotHeader

STORED: Final = 128
REMOVED: Final = 32
"""Most blocks of a piece."""
_TOKENS: Final = 4096
"""Most tokens of a piece, unless one block has more."""
_MOST_TOKENS: Final = 16_384
"""Most tokens of a block; hybrid models have some thousand. A larger block gets no text."""


def in_pieces(events: Sequence[Event]) -> list[Event]:
    """Split events into pieces of a bounded size with the same effect. O(blocks).

    Events that a later clear undoes are left out: an engine may send any number of clears at once, and each takes a
    bit.
    """
    cleared = max((at for at, event in enumerate(events) if type(event) is AllBlocksCleared), default=0)
    return [piece for event in events[cleared:] for piece in pieces(event)]


def pieces(event: Event) -> Iterable[Event]:
    """Split one event into pieces of a bounded size with the same effect; a small one stays. O(blocks)."""
    if isinstance(event, AllBlocksCleared):
        return (event,)
    if isinstance(event, BlockRemoved):
        return (event,) if len(event.block_hashes) <= REMOVED else _removed(event)
    if len(event.block_hashes) <= STORED and len(event.token_ids) <= _TOKENS:
        return (event,)
    return _stored(event)


def _removed(event: BlockRemoved) -> Iterator[Event]:
    hashes, copies = event.block_hashes, event.remaining_copy_counts
    if copies is not None and len(copies) != len(hashes):
        copies = None  # the index does the same
    # Each piece keeps the order of the chain, or the opposite one.
    for at in range(0, len(hashes), REMOVED):
        some = copies[at : at + REMOVED] if copies is not None else None
        yield replace(event, block_hashes=hashes[at : at + REMOVED], remaining_copy_counts=some)


def _stored(event: BlockStored) -> Iterator[Event]:
    hashes, tokens, width, extra = event.block_hashes, event.token_ids, event.block_size, event.extra_keys
    told = 0 < width <= _MOST_TOKENS and len(tokens) == len(hashes) * width
    if not told or (extra is not None and len(extra) != len(hashes)):
        # Its tokens cannot be assigned to blocks: only blocks that are known already are found by their hashes.
        tokens, extra = [], None
    count = min(STORED, max(1, _TOKENS // width)) if tokens else STORED
    parent = event.parent_block_hash
    for at in range(0, len(hashes), count):
        yield replace(
            event,
            block_hashes=hashes[at : at + count],
            parent_block_hash=parent,
            token_ids=tokens[at * width : (at + count) * width],
            extra_keys=extra[at : at + count] if extra is not None else None,
        )
        parent = hashes[min(at + count, len(hashes)) - 1]


LARGE: Final = 32 << 10
"""Bytes; a message with more is large: reading it takes longer than half a millisecond, 400 blocks of 16 tokens."""


class Numbered(NamedTuple):
    """A live batch and its number. `events` counts the events that were sent, before the split. `batch` is None if the
    payload was refused for `refusal`.
    """

    seq: int
    batch: EventBatch | None
    events: int = 0
    refusal: DecodeReason | None = None


class Replayed(NamedTuple):
    """A batch of a replay; `batch` is None if its payload was refused."""

    seq: int
    batch: EventBatch | None


Answer: TypeAlias = Hello | Replayed | ReplayEnd | SnapshotHeader | SnapshotChunk | SnapshotEnd
"""A publisher's decoded answer."""


def is_large(message: Iterable[Sized]) -> bool:
    """Return whether a message must be read in another thread."""
    return sum(map(len, message)) > LARGE


def read_live(message: Sequence[bytes]) -> Numbered:
    """Decode a live batch. Raises `FrameError`."""
    _, seq, payload = frames.parse_live(message)
    try:
        batch = decode_batch(payload)
    except DecodeError as error:
        return Numbered(seq, None, refusal=error.reason)
    return Numbered(seq, _in_pieces(batch), len(batch.events))


def read_reply(message: Sequence[bytes]) -> Answer:
    """Decode an answer. Raises `FrameError`."""
    return answer_of(frames.parse_reply(message))


def answer_of(reply: Reply) -> Answer:
    """Convert a reply to the form that a subscription takes."""
    if isinstance(reply, ReplayItem):
        try:
            return Replayed(reply.seq, _in_pieces(decode_batch(reply.payload)))
        except DecodeError:
            return Replayed(reply.seq, None)
    if isinstance(reply, SnapshotChunk):
        stored = [event for event in in_pieces(reply.events) if type(event) is BlockStored]
        return SnapshotChunk(stored, reply.rejected)
    return reply


def _in_pieces(batch: EventBatch) -> EventBatch:
    return replace(batch, events=in_pieces(batch.events))
