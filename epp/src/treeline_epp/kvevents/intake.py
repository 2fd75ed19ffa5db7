"""What a socket has taken from its peer since its last whole message, counted by the kernel.

ZMQ bounds each frame of a message, but not how many there are, and hands nothing over before the last one has come. So
a message that does not end grows inside of it, and every frame costs 64 bytes there, even an empty one that has two on
the wire. With one message in a socket's queue, no more than one can have been taken since the last one was read: a peer
that has sent more is sending what nobody will take.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import termios
from typing import Final

import zmq

MOST_FRAMES: Final = 5
"""Of a message: no form has more."""
_SPARE_BYTES: Final = 1 << 20
"""Headers, what ZMQ reads in one go (8 KiB), and the heartbeats of one that says nothing: 7 bytes a second."""
_TCP_INFO_BYTES: Final = 136
_RECEIVED_AT: Final = 128  # tcpi_bytes_received in Linux' `struct tcp_info`


class IntakeError(Exception):
    """The connection is to be ended; says why."""


def receive(sock: zmq.Socket[bytes], most_bytes: int) -> list[zmq.Frame]:
    """A message, if there is one. Raises `zmq.Again`, and `IntakeError` for one that is too large, of which it reads
    no more than fits."""
    parts: list[zmq.Frame] = []
    size = 0
    while not parts or parts[-1].more:
        if len(parts) == MOST_FRAMES:
            raise IntakeError(f"it sent a message of over {MOST_FRAMES} frames")
        parts.append(sock.recv(zmq.NOBLOCK, copy=False))
        size += len(parts[-1])
        if size > most_bytes:
            raise IntakeError(f"it sent a message of over {most_bytes} bytes")
    return parts


class Intake:
    """One connection, by the number of its file, which is ZMQ's. Raises `OSError` if that is none of TCP."""

    def __init__(self, fd: int, most_bytes: int) -> None:
        self._fd = fd
        self._most = most_bytes
        self._file = os.fstat(fd).st_ino
        self._before = _received(fd)
        self.read = False
        """A message was read since the last look."""

    def look(self) -> None:
        """Raises `IntakeError` if it has taken more than a message since the last one was read, or is gone."""
        try:
            if os.fstat(self._fd).st_ino != self._file:
                raise IntakeError("it is gone")
            if self.read:
                # In this order it is no less than was taken at the first call, and below no more than at the second.
                self.read, unread = False, _unread(self._fd)
                self._before = _received(self._fd) - unread
                return
            taken = _received(self._fd) - self._before
            if taken > self._most + _SPARE_BYTES and taken - _unread(self._fd) > self._most + _SPARE_BYTES:
                raise IntakeError(f"it sent over {self._most} bytes without a whole message")
        except OSError:
            raise IntakeError("it is gone") from None


def _received(fd: int) -> int:
    """Bytes that have arrived, since the connection was made."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fd)
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    finally:
        sock.detach()
    return int(struct.unpack_from("Q", info, _RECEIVED_AT)[0])


def _unread(fd: int) -> int:
    """Of these, what is still with the kernel."""
    return int(struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))[0])
