"""Frames of HTTP/2 (RFC 9113, sections 4, 6 and 7): their numbers, and the bytes of those that a server sends."""

from __future__ import annotations

import enum
import struct
from collections.abc import Mapping, Sequence
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES: Final = 9
LEAST_FRAME_BYTES: Final = 16_384
"""What every peer takes, and the most that we take: `SETTINGS_MAX_FRAME_SIZE` is at least this."""
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
    """Why a stream or a connection ends (RFC 9113, section 7): those that a server of ours says."""

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
    """The nine bytes before a payload of `length` bytes."""
    return _HEAD.pack(length << 8 | kind, flags, stream)


def settings(values: Mapping[Setting, int]) -> bytes:
    """A SETTINGS frame."""
    return head(SETTINGS, 0, 0, 6 * len(values)) + b"".join(_SETTING.pack(*item) for item in values.items())


def settings_of(payload: bytes) -> list[tuple[int, int]]:
    """The settings that a peer sends, in their order. Its length must be a multiple of six."""
    return list(_SETTING.iter_unpack(payload))


SETTINGS_ACK: Final = head(SETTINGS, ACK, 0, 0)


def ping(data: bytes, *, ack: bool) -> bytes:
    """A PING frame; `data` are eight bytes."""
    return head(PING, ACK if ack else 0, 0, 8) + data


def window_update(stream: int, size: int) -> bytes:
    """`size` more bytes may be sent to us; stream 0 is the connection."""
    return head(WINDOW_UPDATE, 0, stream, 4) + NUMBER.pack(size)


def rst_stream(stream: int, code: int) -> bytes:
    """A stream ends at once."""
    return head(RST_STREAM, 0, stream, 4) + NUMBER.pack(code)


def goaway(last: int, code: int, why: bytes = b"") -> bytes:
    """Streams above `last` were not looked at."""
    return head(GOAWAY, 0, 0, 8 + len(why)) + _PAIR.pack(last, code) + why


def header_block(fields: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Header fields as literals that no table keeps (RFC 7541, section 6.2.2), so that they mean the same always."""
    return b"".join(b"\x00" + _text(name) + _text(value) for name, value in fields)


def _text(text: bytes) -> bytes:
    length = len(text)
    if length < 127:
        return bytes([length]) + text
    out, length = bytearray([127]), length - 127
    while length > 127:
        out.append(length & 127 | 128)
        length >>= 7
    out.append(length)
    return bytes(out) + text
