"""What one connection may ask of a server."""

from __future__ import annotations

import msgspec

from treeline_epp.http2.frames import LEAST_FRAME_BYTES


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
