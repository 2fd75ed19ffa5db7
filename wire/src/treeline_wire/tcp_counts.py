"""Bytes received by a TCP connection, by the kernel's count, for connections inside libraries.

A connection is named by its file number, which stays the library's. Linux only. Raises `OSError` if the number is not
(or no longer) a TCP connection.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_TCP_INFO_BYTES: Final = 136
_RECEIVED_AT: Final = 128  # tcpi_bytes_received in `struct tcp_info`


def identity(fd: int) -> int:
    """Returns an identity that differs between connections even if they reuse a file number."""
    return os.fstat(fd).st_ino


def received(fd: int) -> int:
    """Returns the bytes received since the connection was opened."""
    with _borrowed(fd) as sock:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    return int(struct.unpack_from("Q", info, _RECEIVED_AT)[0])


def unread(fd: int) -> int:
    """Returns the received bytes that the process has not read yet."""
    return int(struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))[0])


def end(fd: int) -> None:
    """Ends the connection; its owner sees the peer disconnect."""
    with _borrowed(fd) as sock:
        sock.shutdown(socket.SHUT_RDWR)


@contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fd)
    try:
        yield sock
    finally:
        sock.detach()
