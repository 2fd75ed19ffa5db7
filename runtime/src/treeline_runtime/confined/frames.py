"""What goes between a worker process and its parent: four bytes of length (big-endian), then the payload."""

from __future__ import annotations

import socket
import struct
import time
from typing import Final

_HEADER: Final = struct.Struct(">I")
_CHUNK: Final = 1 << 20


def send_frame(sock: socket.socket, *parts: bytes) -> None:
    """One payload, which the parts make together. Raises OSError."""
    sock.sendall(_HEADER.pack(sum(map(len, parts))))
    for part in parts:
        sock.sendall(part)


def read_frame(sock: socket.socket, deadline: float | None = None) -> bytearray | None:
    """The next payload; None when the other side has closed. `deadline` is of `time.monotonic`. Raises OSError."""
    header = _read(sock, _HEADER.size, deadline)
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
