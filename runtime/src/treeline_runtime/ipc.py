"""Communication between the runtime's processes: each has one inbox (ZMQ PULL over ipc), and all others connect to it.

    http process ──▶ scheduler, detokenizer, publisher
    scheduler    ──▶ detokenizer, publisher, http (control only)
    detokenizer  ──▶ http, scheduler (StopReq)
    publisher    ──▶ http (control only)

Each data-parallel rank has these processes and inboxes of its own; the HTTP process is one, with an inbox per rank. So
no message says a rank.

Messages between engine parts are in `messages`; those below concern the processes. The sockets are in a folder of mode
0700 that the parent creates and removes.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from treeline_runtime import messages, published

T = TypeVar("T")


READ_AT_ONCE = 256
"""The most messages a plain loop takes at once."""
DRAIN_S = 0.004
"""Seconds for which an event loop takes messages before other tasks run."""
HEARTBEAT_S = 0.5


class Ready(msgspec.Struct, tag=True, frozen=True):
    """A child is ready and serves its inbox."""

    process: str
    info: dict[str, Any]


class Failed(msgspec.Struct, tag=True, frozen=True):
    """A child cannot start, and exits. `message` is for the user."""

    process: str
    message: str


class Heartbeat(msgspec.Struct, tag=True, frozen=True):
    """A child's loop runs: every half second, and when the scheduler's load changed (at most 20 a second)."""

    process: str
    load: published.LoadUpdate | None = None


class AnnouncedReq(msgspec.Struct, tag=True, frozen=True):
    """Asks the publisher for the hashes announced after `after_updates` cache updates. Answered by Reply."""

    id: str
    after_updates: int


ToHttp = messages.BatchTextOut | messages.Reply | Ready | Failed | Heartbeat

decode_to_http = msgspec.msgpack.Decoder(ToHttp).decode
decode_to_publisher = msgspec.msgpack.Decoder(
    published.CacheUpdate | published.LoadUpdate | messages.DrainReq | AnnouncedReq
).decode


class Addresses(msgspec.Struct, frozen=True):
    """The inboxes of a data-parallel rank as ZMQ endpoints: sockets in a private folder."""

    folder: str
    rank: int = 0

    def of(self, process: str) -> str:
        return f"ipc://{self.folder}/{process}-{self.rank}.ipc"

    def remove(self) -> None:
        """Removes the sockets and the folder. Idempotent."""
        shutil.rmtree(self.folder, ignore_errors=True)


class Outbox:
    """Sends to one inbox without blocking. Messages wait here until the other side is connected.

    `limit`: the most waiting messages; beyond it, or once closed, `send` drops and returns False. 0 = no limit.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, *, limit: int = 0) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, limit)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)

    def send(self, message: msgspec.Struct) -> bool:
        if self._socket.closed:
            return False
        try:
            self._socket.send(messages.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def flush(self, timeout_ms: int) -> None:
        """Closes, giving waiting messages `timeout_ms` to leave."""
        self._socket.close(linger=timeout_ms)


class HeartbeatSender:
    """Sends heartbeats of `process` to the parent; its loop calls `beat` in each turn."""

    def __init__(self, process: str, http: Outbox) -> None:
        self._http = http
        self._heartbeat = Heartbeat(process)
        self._beat_at = float("-inf")

    def beat(self) -> None:
        now = time.monotonic()
        if now - self._beat_at >= HEARTBEAT_S:
            self._beat_at = now
            self._http.send(self._heartbeat)


class Inbox(Generic[T]):
    """The inbox of a process with a plain loop."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, decode: Callable[[bytes], T]) -> None:
        self.socket = context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.bind(address)
        self._decode = decode

    def take(self, limit: int = READ_AT_ONCE) -> list[T]:
        """Messages that have arrived; does not wait."""
        taken: list[T] = []
        while len(taken) < limit:
            try:
                taken.append(self._decode(self.socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                break
        return taken

    def wait(self, timeout_ms: int) -> bool:
        """Blocks until a message has arrived; False after `timeout_ms`."""
        return bool(self.socket.poll(timeout_ms))

    def wait_or(self, fd: int, timeout_ms: int) -> bool:
        """Also waits for a descriptor; returns whether it is readable."""
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(fd, zmq.POLLIN)
        return any(found == fd for found, _ in poller.poll(timeout_ms))

    def close(self) -> None:
        self.socket.close(linger=0)


class AsyncInbox(Generic[T]):
    """The inbox for an event loop: calls `on_message` in the loop, one message at a time."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        decode: Callable[[bytes], T],
        on_message: Callable[[T], None],
    ) -> None:
        self._inbox = Inbox(context, address, decode)
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._fd = int(self._inbox.socket.getsockopt(zmq.FD))
        self._closed = False
        self._loop.add_reader(self._fd, self._drain)
        self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        # ZMQ's descriptor is edge-triggered: it must be read until empty, or scheduled to be.
        if self._closed:
            return
        until = time.monotonic() + DRAIN_S
        while time.monotonic() < until:
            taken = self._inbox.take(1)
            if not taken:
                return
            self._on_message(taken[0])
        self._loop.call_soon(self._drain)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)
            self._inbox.close()
