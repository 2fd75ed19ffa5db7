"""What a connection reports to the server of its streams."""

from __future__ import annotations

import msgspec

from treeline_epp.http2.fields import Fields
from treeline_epp.http2.frames import LEAST_FRAME_BYTES, Code


class Limits(msgspec.Struct, frozen=True):
    """Bytes, streams, and frames that bring nothing."""

    streams: int = 32_768
    """Open at once; more are refused, and may be tried again."""
    all_streams: int = 65_536
    """Open at once on all connections of a server: each keeps about two kilobytes."""
    header_bytes: int = 16_384
    """Of the fields of one request, as gRPC's own servers take. Decoding costs by the square of a block's bytes."""
    stream_window: int = 1 << 20
    """Bytes of a stream that may come before somebody has read them."""
    connection_window: int = 16 << 20
    """Bytes on their way for all streams together."""
    frame_bytes: int = LEAST_FRAME_BYTES
    idle_frames: int = 10_000
    """That bring nothing (PING, SETTINGS, PRIORITY, WINDOW_UPDATE, empty DATA, RST_STREAM of what is not open), beyond
    those that requests and answers pay for. What one of a proxy's clients can cause is not among them."""
    paid_frames: int = 16
    """Of that kind that a stream pays for, when it was answered or the peer took it back."""
    bytes_a_frame: int = 256
    """Of a body, sent, that pay for one."""


class ConnectionFault(Exception):
    """The peer broke the protocol of the connection."""

    def __init__(self, code: Code, why: str) -> None:
        super().__init__(why)
        self.code = code


def unpadded(payload: memoryview) -> memoryview:
    """The payload of a padded frame. Raises ConnectionFault."""
    if not payload or payload[0] >= len(payload):
        raise ConnectionFault(Code.PROTOCOL_ERROR, "more padding than frame")
    return payload[1 : len(payload) - payload[0]]


class Requested(msgspec.Struct, frozen=True, gc=False):
    """A new stream. `ended`: nothing follows."""

    stream: int
    fields: Fields
    ended: bool


class Came(msgspec.Struct, frozen=True, gc=False):
    """Bytes of a request's body; tell `Connection.read` when they are dealt with. `ended`: nothing follows."""

    stream: int
    data: bytes
    ended: bool


class Ended(msgspec.Struct, frozen=True, gc=False):
    """The peer took the stream back, or it was closed for a fault: nothing can be sent on it."""

    stream: int


class Roomy(msgspec.Struct, frozen=True, gc=False):
    """All that waited to be sent on a stream has gone."""

    stream: int


Event = Requested | Came | Ended | Roomy
