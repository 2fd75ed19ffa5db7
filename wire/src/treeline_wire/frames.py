"""ZMQ messages as lists of frames: live events (PUB), and replay, hello and snapshot (ROUTER and DEALER).

Live and replay are the peers' formats. Hello and snapshot are ours, on the same ROUTER: requests have four frames
`b"", b"treeline", verb, version` (foreign servers drop those), replies five (the fifth is a msgpack payload). All
functions take and return frames as a DEALER sees them: an empty delimiter first, no identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec
from msgspec import Struct

from .errors import WireError
from .events import BlockStored, DecodeError, decode_batch, encode_batch

VERSION: Final = 1
"""The version of hello and snapshot that we use. New members need no new version."""

_MAGIC: Final = b"treeline"
_HELLO: Final = b"hello"
_SNAPSHOT: Final = b"snapshot"
_CHUNK: Final = b"chunk"
_END: Final = b"end"
_REPLAY_END: Final = b"\xff" * 8
_MAX_SEQ: Final = (1 << 64) - 2


class FrameError(WireError):
    """A message in a form that no known version sends."""


class ReplayRequest(Struct, frozen=True):
    """Asks for all batches from `start_seq` on."""

    start_seq: int


class HelloRequest(Struct, frozen=True):
    """Asks for `Hello`. `version`: the newest that the asker knows."""

    version: int = VERSION


class SnapshotRequest(Struct, frozen=True):
    """Asks for the whole cache. `version`: the newest that the asker knows."""

    version: int = VERSION


class ReplayItem(Struct, frozen=True):
    """One batch of a replay; old publishers leave `topic` empty. `payload` is for `events.decode_batch`."""

    topic: bytes
    seq: int
    payload: bytes


class ReplayEnd(Struct, frozen=True):
    """The replay is complete."""


class Hello(Struct, frozen=True):
    """The publisher's epoch (new at each start) and the seqs that it can replay, None if there are none."""

    epoch: int
    oldest: int | None = None
    newest: int | None = None


class SnapshotHeader(Struct, frozen=True):
    """A snapshot of `blocks` blocks follows. It is the state after batch `seq` (-1: before the first batch)."""

    epoch: int
    seq: int
    blocks: int


class SnapshotChunk(Struct, frozen=True):
    """A part of the snapshot: stored blocks, parents before children. `rejected` counts malformed events."""

    events: list[BlockStored]
    rejected: int = 0


class SnapshotEnd(Struct, frozen=True):
    """The snapshot is complete."""


Request: TypeAlias = ReplayRequest | HelloRequest | SnapshotRequest
Reply: TypeAlias = ReplayItem | ReplayEnd | Hello | SnapshotHeader | SnapshotChunk | SnapshotEnd

_encoder = msgspec.msgpack.Encoder()
_hello_decoder = msgspec.msgpack.Decoder(Hello)
_header_decoder = msgspec.msgpack.Decoder(SnapshotHeader)


def live(topic: bytes, seq: int, payload: bytes) -> list[bytes]:
    """Returns the frames of one live message."""
    return [topic, _seq_bytes(seq), payload]


def parse_live(frames: Sequence[bytes]) -> tuple[bytes, int, bytes]:
    """Returns `(topic, seq, payload)` of a live message. Raises `FrameError`."""
    if len(frames) != 3:
        raise FrameError(f"a live message has 3 frames, not {len(frames)}")
    return bytes(frames[0]), _seq(frames[1]), bytes(frames[2])


def replay_request(start_seq: int) -> list[bytes]:
    """Returns a request for all batches from `start_seq` on."""
    return [b"", _seq_bytes(start_seq)]


def hello_request() -> list[bytes]:
    """Returns a request for `Hello`. Foreign publishers do not answer."""
    return [b"", _MAGIC, _HELLO, b"%d" % VERSION]


def snapshot_request() -> list[bytes]:
    """Returns a request for `SnapshotHeader`, `SnapshotChunk` …, `SnapshotEnd`. Foreign publishers do not answer."""
    return [b"", _MAGIC, _SNAPSHOT, b"%d" % VERSION]


def parse_request(frames: Sequence[bytes]) -> Request | None:
    """Parses a client's request; `frames` without the identity. None for an unknown one, which servers drop."""
    if len(frames) == 2 and frames[0] == b"" and len(frames[1]) == 8:
        return ReplayRequest(int.from_bytes(frames[1], "big"))
    if len(frames) == 4 and frames[0] == b"" and frames[1] == _MAGIC:
        version = _version(frames[3])
        if version is None:
            return None
        if frames[2] == _HELLO:
            return HelloRequest(version)
        if frames[2] == _SNAPSHOT:
            return SnapshotRequest(version)
    return None


def encode_reply(reply: Reply) -> list[bytes]:
    """Returns the frames of any reply; a replay's in the newest foreign form."""
    match reply:
        case ReplayItem():
            return [b"", reply.topic, _seq_bytes(reply.seq), reply.payload]
        case ReplayEnd():
            return [b"", b"", _REPLAY_END, b""]
        case Hello():
            return _ours(_HELLO, _encoder.encode(reply))
        case SnapshotHeader():
            return _ours(_SNAPSHOT, _encoder.encode(reply))
        case SnapshotChunk():
            return _ours(_CHUNK, encode_batch(0.0, reply.events))
        case SnapshotEnd():
            return _ours(_END, _encoder.encode({}))


def parse_reply(frames: Sequence[bytes]) -> Reply:
    """Parses a publisher's answer, in any known form. Raises `FrameError`."""
    if len(frames) == 5 and frames[0] == b"" and frames[1] == _MAGIC:
        return _parse_ours(bytes(frames[2]), frames[3], bytes(frames[4]))
    if len(frames) not in (3, 4) or frames[0] != b"":
        raise FrameError(f"no replay reply has this shape ({len(frames)} frames)")
    topic = bytes(frames[1]) if len(frames) == 4 else b""  # older publishers send none
    if frames[-2] == _REPLAY_END:
        return ReplayEnd()
    return ReplayItem(topic, _seq(frames[-2]), bytes(frames[-1]))


def _ours(verb: bytes, payload: bytes) -> list[bytes]:
    return [b"", _MAGIC, verb, b"%d" % VERSION, payload]


def _parse_ours(verb: bytes, version: bytes, payload: bytes) -> Reply:
    if _version(version) is None:
        raise FrameError("the version is not a number")
    try:
        if verb == _HELLO:
            return _hello_decoder.decode(payload)
        if verb == _SNAPSHOT:
            return _header_decoder.decode(payload)
        if verb == _CHUNK:
            return _chunk(payload)
        if verb == _END:
            return SnapshotEnd()
    except (msgspec.MsgspecError, DecodeError, ValueError, RecursionError, MemoryError) as error:
        raise FrameError(f"bad payload of {verb.decode()}: {str(error)[:200]}") from None
    raise FrameError("unknown verb")


def _chunk(payload: bytes) -> SnapshotChunk:
    batch = decode_batch(payload)
    stored = [event for event in batch.events if type(event) is BlockStored]
    return SnapshotChunk(stored, len(batch.events) - len(stored) + sum(batch.rejected.values()))


def _seq_bytes(seq: int) -> bytes:
    if not 0 <= seq <= _MAX_SEQ:
        raise ValueError(f"seq {seq} is out of range")
    return seq.to_bytes(8, "big")


def _seq(frame: bytes) -> int:
    if len(frame) != 8:
        raise FrameError(f"a seq has 8 bytes, not {len(frame)}")
    return int.from_bytes(frame, "big")


def _version(frame: bytes) -> int | None:
    return int(frame) if len(frame) <= 4 and frame.isdigit() else None
