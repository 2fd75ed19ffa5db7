"""What a socket has taken from its peer since its last whole message, counted by the kernel.

ZMQ bounds each frame of a message, but not how many there are, and hands nothing over before the last one has come. So
a message that does not end grows inside of it, and every frame costs 64 bytes there, even an empty one that has two on
the wire. With one message in a socket's queue, no more than one can have been taken since the last one was read: a peer
that has sent more is sending what will never be read.

The time on the loop that all publishers share.

A loop runs all that is ready before it looks for more: a hundred publishers with something to do would each have their
time, one after the other, and a request that comes meanwhile waits for all of them. So each piece of work needs the
*turn*, which one has at a time. Work that finds that the publishers have had `SLICE_S` in this round of the loop waits
for the next one, while everything else that is ready is run.
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
    """`async with` it around each piece of work, which must not wait for anything. Turns are given in the order in
    which they are asked for."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._lock = asyncio.Lock()
        self._clock = clock
        self._began: float | None = None  # the first piece of this round of the loop

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
"""Of a message: no form has more."""
_SPARE_BYTES: Final = 1 << 20
"""Headers, what ZMQ reads in one go (8 KiB), and heartbeats of the peer while it says nothing."""


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
    """What one socket has taken; nothing is known before its connection begins. `read` is to be set with each message,
    also with those that are read before that."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._fd: int | None = None
        self._file = 0
        self._before = 0
        self.read = False
        """A message was read since the last look."""

    def begin(self, fd: int) -> None:
        """The connection is there, by the number of its file, which is ZMQ's. What came until now counts: a peer may
        have sent much before its handshake is noticed here. Raises `IntakeError` if the file is none of TCP."""
        try:
            self._file = identity(fd)
            received(fd)
        except OSError:
            raise self._gone() from None
        self._fd = fd

    def look(self) -> None:
        """Raises `IntakeError` if it has taken more than a message since the last one was read, or is gone."""
        if self._fd is None:
            return
        try:
            if identity(self._fd) != self._file:
                raise self._gone()
            if self.read:
                # In this order it is no less than was taken at the first call, and below no more than at the second.
                self.read, waiting = False, unread(self._fd)
                self._before = received(self._fd) - waiting
                return
            taken = received(self._fd) - self._before
            if taken > self._most + _SPARE_BYTES and taken - unread(self._fd) > self._most + _SPARE_BYTES:
                raise IntakeError(f"it sent over {self._most} bytes without a whole message")
        except OSError:
            raise self._gone() from None

    def _gone(self) -> IntakeError:
        """ZMQ itself closes a connection for one frame that is too large; its monitor may say so later."""
        return IntakeError(f"it is gone, or sent a message of over {self._most} bytes")
