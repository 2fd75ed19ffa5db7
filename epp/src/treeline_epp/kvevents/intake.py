"""A bound on the bytes that a socket receives without a whole message, counted by the kernel; and the loop time that
publishers share.

ZMQ bounds each frame of a message, but not their number, and hands nothing over before the last one has come. So an
endless message grows inside of ZMQ, and every frame costs 64 bytes there, even an empty one of two bytes on the wire.
With one message in a socket's queue, at most one more can have been received since the last one was read: a peer that
has sent more is sending a message that will never end.

A loop runs all ready tasks before it looks for more: a hundred publishers with work would each have their time, one
after the other, and a request that comes meanwhile waits for all of them. So each piece of work needs the *turn*, which
only one has at a time. When the publishers have had `SLICE_S` in this round of the loop, the next piece waits for the
next round, while all other ready tasks run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import zmq
from treeline_wire.tcp_counts import identity, received, unread

SLICE_S: Final = 0.001


class Turns:
    """A lock for pieces of work that await nothing (`async with`). Turns are given in the order of requests."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._lock = asyncio.Lock()
        self._clock = clock
        self._began: float | None = None  # start of the first piece in this round of the loop

    async def __aenter__(self) -> None:
        await self._lock.acquire()
        try:
            if self._began is not None and self._clock() - self._began >= SLICE_S:
                await asyncio.sleep(0)
        except BaseException:
            self._lock.release()
            raise
        if self._began is None:
            self._began = self._clock()
            asyncio.get_running_loop().call_soon(self._next_round)

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()

    def _next_round(self) -> None:
        self._began = None


MOST_FRAMES: Final = 5
"""Most frames of a message: no form has more."""
_SPARE_BYTES: Final = 1 << 20
"""Room for headers, one read of ZMQ (8 KiB), and heartbeats of an otherwise silent peer."""


class IntakeError(Exception):
    """The connection must be closed; the message says why."""


def receive(sock: zmq.Socket[bytes], most_bytes: int) -> list[zmq.Frame]:
    """Return a message, if one waits. Raises `zmq.Again`, and `IntakeError` as soon as it is too large."""
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
    """The count of one socket; it begins with the connection. Set `read` with each message, also before that."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._fd: int | None = None
        self._file = 0
        self._before = 0
        self.read = False
        """Whether a message was read since the last look."""

    def begin(self, fd: int) -> None:
        """Begin with a connection, by its file descriptor, which is ZMQ's. Bytes received so far count: a peer may send
        much before its handshake is noticed here. Raises `IntakeError` if the file is no TCP socket.
        """
        try:
            self._file = identity(fd)
            received(fd)
        except OSError:
            raise self._gone() from None
        self._fd = fd

    def look(self) -> None:
        """Check the count. Raises `IntakeError` if more than a message came since the last one was read, or the socket
        is gone.
        """
        if self._fd is None:
            return
        try:
            if identity(self._fd) != self._file:
                raise self._gone()
            if self.read:
                # In this order it is at least the count at the first call, and below at most that at the second.
                self.read, waiting = False, unread(self._fd)
                self._before = received(self._fd) - waiting
                return
            taken = received(self._fd) - self._before
            if taken > self._most + _SPARE_BYTES and taken - unread(self._fd) > self._most + _SPARE_BYTES:
                raise IntakeError(f"it sent over {self._most} bytes without a whole message")
        except OSError:
            raise self._gone() from None

    def _gone(self) -> IntakeError:
        """Return the error for a lost connection. ZMQ's monitor may report later that it closed one itself."""
        return IntakeError(f"it is gone, or sent a message of over {self._most} bytes")
