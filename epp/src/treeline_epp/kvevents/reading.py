"""Messages of a publisher, read: batches decoded and in pieces, so that whoever applies them has none that is large.

Pure. A large message is read in another thread, which takes the time of its cutting and of its freeing, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from typing import Final, NamedTuple, TypeAlias

from msgspec.structs import replace
from treeline_wire import frames
from treeline_wire.events import BlockStored, DecodeError, DecodeReason, EventBatch, decode_batch
from treeline_wire.frames import Hello, ReplayEnd, ReplayItem, Reply, SnapshotChunk, SnapshotEnd, SnapshotHeader

from treeline_epp.kvevents.pieces import in_pieces

LARGE: Final = 32 << 10
"""Bytes; a message with more is large: reading it takes longer than half a millisecond, 400 blocks of 16 tokens."""


class Numbered(NamedTuple):
    """A live batch and its number. `events` counts those that were sent, which may be in pieces now. `batch` is None
    where the payload was refused for `refusal`."""

    seq: int
    batch: EventBatch | None
    events: int = 0
    refusal: DecodeReason | None = None


class Replayed(NamedTuple):
    """A batch of a replay; `batch` is None where its payload was refused."""

    seq: int
    batch: EventBatch | None


Answer: TypeAlias = Hello | Replayed | ReplayEnd | SnapshotHeader | SnapshotChunk | SnapshotEnd
"""What a publisher may answer, read."""


def is_large(message: Iterable[Sized]) -> bool:
    """Is it to be read in another thread?"""
    return sum(map(len, message)) > LARGE


def read_live(message: Sequence[bytes]) -> Numbered:
    """Raises `FrameError`."""
    _, seq, payload = frames.parse_live(message)
    try:
        batch = decode_batch(payload)
    except DecodeError as error:
        return Numbered(seq, None, refusal=error.reason)
    return Numbered(seq, _in_pieces(batch), len(batch.events))


def read_reply(message: Sequence[bytes]) -> Answer:
    """Raises `FrameError`."""
    return answer_of(frames.parse_reply(message))


def answer_of(reply: Reply) -> Answer:
    """What a subscription takes of a reply."""
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
