"""gRPC over HTTP/2: messages in a request's body, and how calls begin and end.

https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

from __future__ import annotations

import enum
import re
import struct
from typing import Final
from urllib.parse import quote

from treeline_epp.http2.fields import Fields
from treeline_epp.http2.frames import header_block

_PREFIX = struct.Struct(">BI")
PREFIX_BYTES: Final = _PREFIX.size
_TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])")
_KINDS = re.compile(r"application/grpc([+;].*)?")
_UNITS: Final = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_CRUMB_BYTES, _MOST_CRUMBS = 512, 64
_KIND: Final = (b"content-type", b"application/grpc")
_UNSAFE_IN_MESSAGES: Final = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


class Status(enum.IntEnum):
    """The status with which a call ends."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class CallError(Exception):
    """A call fails with this status."""

    def __init__(self, status: Status, why: str) -> None:
        super().__init__(why)
        self.status = status


def _status(status: Status, why: str) -> list[tuple[bytes, bytes]]:
    fields = [(b"grpc-status", b"%d" % status)]
    if why:
        fields.append((b"grpc-message", quote(why[:1000], safe=_UNSAFE_IN_MESSAGES).encode()))
    return fields


BEGINNING: Final = header_block([(b":status", b"200"), _KIND])
"""The fields of an answer with messages."""


def ending(status: Status, why: str = "") -> bytes:
    """Return an answer's trailers."""
    return header_block(_status(status, why))


WELL: Final = ending(Status.OK)


def only(status: Status, why: str) -> bytes:
    """Return the fields of an answer without a message."""
    return header_block([(b":status", b"200"), _KIND, *_status(status, why)])


NOT_GRPC: Final = header_block([(b":status", b"415"), (b"content-type", b"text/plain")])
NOT_GRPC_BODY: Final = b"this port speaks gRPC\n"


def method_of(fields: Fields) -> str | None:
    """Return a request's `/package.Service/Method`; None if it is no gRPC request."""
    if fields[":method"] != "POST" or not _KINDS.fullmatch(fields.get("content-type", "")):
        return None
    return fields[":path"]


def timeout_of(fields: Fields) -> float | None:
    """Return the seconds that the client waits. Raises CallError."""
    text = fields.get("grpc-timeout")
    if text is None:
        return None
    found = _TIMEOUT.fullmatch(text)
    if found is None:
        raise CallError(Status.INTERNAL, f"grpc-timeout {text[:20]!r} is no time")
    return int(found[1]) * _UNITS[found[2]]


def prefix(size: int) -> bytes:
    """Return the bytes before a message of this size."""
    return _PREFIX.pack(0, size)


class MessageReader:
    """Makes messages from the pieces of a body."""

    def __init__(self, most_bytes: int) -> None:
        """Make a reader; `most_bytes` bounds one message."""
        self._most = most_bytes
        self._pieces: list[bytes] = []
        self._size = 0
        self._crumbs = 0
        """Number of small pieces at the end: each takes more memory than it has bytes."""
        self.over = False
        """Whether a message was too large: neither it nor later ones are kept."""

    @property
    def partial_bytes(self) -> int:
        """Bytes of the message that is not whole yet."""
        return self._size

    def feed(self, data: bytes) -> list[bytes | None]:
        """Take a piece; return the messages that are whole now, and None for one that is too large, which is the last.
        Raises CallError; then the call is over.
        """
        if self.over:
            return []
        if not self._pieces:
            size = len(data)
            if size >= PREFIX_BYTES and self._length(data) == size - PREFIX_BYTES and not self.over:
                return [data[PREFIX_BYTES:]]
        elif data:
            needed = self._needed()
            if needed is not None and self._size + len(data) < needed:
                self._keep(data)
                return []
        if data:
            self._keep(data)
        return self._whole()

    def _keep(self, data: bytes) -> None:
        self._pieces.append(data)
        self._size += len(data)
        self._crumbs = self._crumbs + 1 if len(data) < _CRUMB_BYTES else 0
        if self._crumbs == _MOST_CRUMBS:
            self._pieces[-_MOST_CRUMBS:] = [b"".join(self._pieces[-_MOST_CRUMBS:])]
            self._crumbs = 0

    def _needed(self) -> int | None:
        """Return the bytes of the next message and its prefix, or None without a whole prefix."""
        first = self._pieces[0]
        return PREFIX_BYTES + self._length(first) if len(first) >= PREFIX_BYTES else None

    def _whole(self) -> list[bytes | None]:
        found: list[bytes | None] = []
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        at = 0
        while len(data) - at >= PREFIX_BYTES:
            end = at + PREFIX_BYTES + self._length(data, at)
            if self.over:
                found.append(None)
                at = len(data)
                break
            if end > len(data):
                break
            found.append(data[at + PREFIX_BYTES : end])
            at = end
        rest = data[at:]
        self._pieces, self._size, self._crumbs = ([rest] if rest else []), len(rest), 0
        return found

    def _length(self, data: bytes, at: int = 0) -> int:
        compressed, length = _PREFIX.unpack_from(data, at)
        if compressed:
            raise CallError(Status.UNIMPLEMENTED, "messages may not be compressed")
        self.over = self.over or length > self._most
        return int(length)
