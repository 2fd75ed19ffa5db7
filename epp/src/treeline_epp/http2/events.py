"""The events that a connection reports, and its limits."""

from __future__ import annotations

import msgspec

from treeline_epp.http2.fields import Fields
from treeline_epp.http2.frames import LEAST_FRAME_BYTES, Code


class Limits(msgspec.Struct, frozen=True):
    """Bounds of a connection: bytes, streams, and frames without content."""

    streams: int = 32_768
    """Most open streams; more are refused, and may be tried again."""
    all_streams: int = 65_536
    """Most open streams on all connections of a server: each keeps about two kilobytes."""
    header_bytes: int = 16_384
    """Most bytes of one request's fields, as in gRPC's own servers. Decoding time is quadratic in a block's bytes."""
    stream_window: int = 1 << 20
    """Most unread bytes of a stream."""
    connection_window: int = 16 << 20
    """Most bytes in flight for all streams together."""
    frame_bytes: int = LEAST_FRAME_BYTES
    idle_frames: int = 10_000
    """Most frames without content (PING, SETTINGS, PRIORITY, WINDOW_UPDATE, empty DATA, RST_STREAM of a closed stream),
    beyond those that requests and answers pay for. Frames that a single client of a proxy can cause do not count."""
    paid_frames: int = 16
    """Such frames that a stream pays for, when it is answered or the peer resets it."""
    bytes_a_frame: int = 256
    """Sent bytes of a body that pay for one such frame."""


class ConnectionFault(Exception):
    """The peer broke the protocol of the connection."""

    def __init__(self, code: Code, why: str) -> None:
        super().__init__(why)
        self.code = code


def unpadded(payload: memoryview) -> memoryview:
    """Return the payload of a padded frame. Raises ConnectionFault."""
    if not payload or payload[0] >= len(payload):
        raise ConnectionFault(Code.PROTOCOL_ERROR, "more padding than frame")
    return payload[1 : len(payload) - payload[0]]


class Requested(msgspec.Struct, frozen=True, gc=False):
    """A new stream. `ended`: it has no body."""

    stream: int
    fields: Fields
    ended: bool


class Came(msgspec.Struct, frozen=True, gc=False):
    """Bytes of a request's body; call `Connection.read` when they are handled. `ended`: they are the last."""

    stream: int
    data: bytes
    ended: bool


class Ended(msgspec.Struct, frozen=True, gc=False):
    """The peer reset the stream, or a fault closed it: no more can be sent on it."""

    stream: int


class Roomy(msgspec.Struct, frozen=True, gc=False):
    """All waiting data of a stream are sent."""

    stream: int


Event = Requested | Came | Ended | Roomy
