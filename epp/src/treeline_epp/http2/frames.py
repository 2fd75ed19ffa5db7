"""Frames of HTTP/2 (RFC 9113, sections 4, 6 and 7): their numbers, and the bytes of frames that a server sends."""

from __future__ import annotations

import enum
import struct
from collections.abc import Mapping, Sequence
from typing import Final

from hpack import Encoder

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES: Final = 9
LEAST_FRAME_BYTES: Final = 16_384
"""Largest frame that every peer takes, and that we take: `SETTINGS_MAX_FRAME_SIZE` is at least this."""
MOST_FRAME_BYTES: Final = (1 << 24) - 1
MOST_WINDOW: Final = (1 << 31) - 1
MOST_STREAM: Final = (1 << 31) - 1
FIRST_WINDOW: Final = 65_535

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
PRIORITIZED: Final = 0x20


class Setting(enum.IntEnum):
    """Names of settings (RFC 9113, section 6.5.2)."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class Code(enum.IntEnum):
    """The reasons for which our server ends a stream or a connection (RFC 9113, section 7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


_HEAD = struct.Struct(">IBI")
_SETTING = struct.Struct(">HI")
NUMBER = struct.Struct(">I")
_PAIR = struct.Struct(">II")


def head(kind: int, flags: int, stream: int, length: int) -> bytes:
    """Return the nine bytes before a payload of `length` bytes."""
    return _HEAD.pack(length << 8 | kind, flags, stream)


def settings(values: Mapping[Setting, int]) -> bytes:
    """Return a SETTINGS frame."""
    return head(SETTINGS, 0, 0, 6 * len(values)) + b"".join(_SETTING.pack(*item) for item in values.items())


def settings_of(payload: bytes) -> list[tuple[int, int]]:
    """Return a peer's settings, in their order. The payload's length must be a multiple of six."""
    return list(_SETTING.iter_unpack(payload))


SETTINGS_ACK: Final = head(SETTINGS, ACK, 0, 0)


def ping(data: bytes, *, ack: bool) -> bytes:
    """Return a PING frame; `data` are eight bytes."""
    return head(PING, ACK if ack else 0, 0, 8) + data


def window_update(stream: int, size: int) -> bytes:
    """Return a WINDOW_UPDATE: the peer may send `size` more bytes; stream 0 is the connection."""
    return head(WINDOW_UPDATE, 0, stream, 4) + NUMBER.pack(size)


def rst_stream(stream: int, code: int) -> bytes:
    """Return an RST_STREAM: the stream ends at once."""
    return head(RST_STREAM, 0, stream, 4) + NUMBER.pack(code)


def goaway(last: int, code: int, why: bytes = b"") -> bytes:
    """Return a GOAWAY: streams above `last` were not processed."""
    return head(GOAWAY, 0, 0, 8 + len(why)) + _PAIR.pack(last, code) + why


def header_block(fields: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Encode header fields without entering any in a table, so their bytes always mean the same."""
    return bytes(Encoder().encode([(name, value, True) for name, value in fields], huffman=False))
