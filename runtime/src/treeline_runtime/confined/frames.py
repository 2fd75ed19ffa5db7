"""What goes between a worker process and its parent: four bytes of length (big-endian), then the payload."""

from __future__ import annotations

import socket
import struct
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio

HEADER_BYTES: Final = 4
_HEADER: Final = struct.Struct(">I")
_CHUNK: Final = 1 << 20


def header(size: int) -> bytes:
    """Goes before a payload of so many bytes."""
    return _HEADER.pack(size)


async def receive_frame(reader: asyncio.StreamReader) -> bytes:
    """The next payload, in an event loop. Raises OSError, and IncompleteReadError when the other side has closed."""
    (size,) = _HEADER.unpack(await reader.readexactly(HEADER_BYTES))
    return await reader.readexactly(size)


def send_frame(sock: socket.socket, payload: bytes) -> None:
    """Raises OSError."""
    sock.sendall(header(len(payload)))
    sock.sendall(payload)


def read_frame(sock: socket.socket, deadline: float | None = None) -> bytearray | None:
    """The next payload; None when the other side has closed. `deadline` is of `time.monotonic`. Raises OSError."""
    header = _read(sock, HEADER_BYTES, deadline)
    return None if header is None else _read(sock, _HEADER.unpack(header)[0], deadline)


def _read(sock: socket.socket, size: int, deadline: float | None) -> bytearray | None:
    data = bytearray()
    while len(data) < size:
        if deadline is not None:
            sock.settimeout(max(deadline - time.monotonic(), 1e-3))
        piece = sock.recv(min(size - len(data), _CHUNK))
        if not piece:
            return None
        data += piece
    return data
