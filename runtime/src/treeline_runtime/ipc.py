"""How the runtime's processes reach each other: one inbox (ZMQ PULL, ipc) per process; everybody else connects to it.

    http process ──▶ scheduler.ipc, detokenizer.ipc, publisher.ipc, http-1.ipc … (`--http-workers`)
    http workers ──▶ scheduler.ipc, detokenizer.ipc, http.ipc (control only)
    scheduler    ──▶ detokenizer.ipc, publisher.ipc, http.ipc (control only)
    detokenizer  ──▶ http.ipc, http-1.ipc …, scheduler.ipc (StopReq)
    publisher    ──▶ http.ipc (control only)

Messages between engine parts are in `messages`; those below are about the processes themselves. The sockets lie in a
folder of mode 0700 that the parent makes and removes.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from treeline_runtime import messages

T = TypeVar("T")


READ_AT_ONCE = 256
"""Messages that a process without an event loop takes at a time."""
DRAIN_S = 0.004
"""How long an event loop takes messages before others get their turn."""
HEARTBEAT_S = 0.5


class Ready(msgspec.Struct, tag=True, frozen=True):
    """A child has loaded what it needs and serves its inbox."""

    process: str
    info: dict[str, Any]


class Failed(msgspec.Struct, tag=True, frozen=True):
    """A child cannot start; it exits right after. `message` is meant for the user."""

    process: str
    message: str


class Heartbeat(msgspec.Struct, tag=True, frozen=True):
    """A child moves: its loop came round. At least every half second; the scheduler's also when its load changed (at
    most 20 a second)."""

    process: str
    load: messages.LoadUpdate | None = None
    """The scheduler's."""


class AnnouncedReq(msgspec.Struct, tag=True, frozen=True):
    """Ask the publisher what it has announced, once it has applied `after_updates` cache updates. Answered by Reply."""

    id: str
    after_updates: int


# ---- between the first HTTP process and its workers ------------------------------------------------------


class Begin(msgspec.Struct, tag=True, frozen=True):
    """The engine is ready: serve. Answered by Ready."""

    scheduler: dict[str, Any]
    """What the scheduler said about itself."""
    kv_events: dict[str, Any] | None
    """Where events are published; None: nowhere."""


class StateUpdate(msgspec.Struct, tag=True, frozen=True):
    """Where the server is in its life: the fields of the same names of `server.service.State`, which has their meaning.
    Sent whenever one of them has changed; that a worker may serve is said by Begin."""

    draining: bool
    refusing: bool
    failure: str | None
    problem: str | None
    failing_since: float
    asleep: int
    operation: str | None
    pausing: bool
    holding: bool
    unheard: bool
    model_path: str | None
    weight_version: str
    heartbeat_at: dict[str, float]
    heartbeats: int
    load: messages.LoadUpdate


class EndAll(msgspec.Struct, tag=True, frozen=True):
    """End whatever is in flight, now."""

    finish: messages.FinishReason


class AbortNamed(msgspec.Struct, tag=True, frozen=True):
    """Abort what clients call so. Idempotent; legal for unknown names."""

    name: str


class SamplesReq(msgspec.Struct, tag=True, frozen=True):
    """Ask for the metrics. Answered by Reply; `data` has the `samples` (`server.metrics.Samples`)."""

    id: str


class Observed(msgspec.Struct, tag=True, frozen=True):
    """What a worker has seen of the engine: it answered; or a request failed; or (`problem`) it failed a check."""

    answered: bool
    problem: str | None = None


class Idle(msgspec.Struct, tag=True, frozen=True):
    """The server stops, and this worker answers no request any more."""

    process: str


ToHttp = messages.BatchTextOut | messages.Reply | Ready | Failed | Heartbeat | Observed | Idle
ToWorker = (
    messages.BatchTextOut | messages.Reply | Begin | StateUpdate | messages.HeardReq | EndAll | AbortNamed | SamplesReq
)

decode_to_http = msgspec.msgpack.Decoder(ToHttp).decode
"""Of the first HTTP process."""
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_to_publisher = msgspec.msgpack.Decoder(
    messages.CacheUpdate | messages.LoadUpdate | messages.DrainReq | AnnouncedReq
).decode


class Process(msgspec.Struct, frozen=True):
    """A process by what it does and, where several do the same, by its rank. The parent is the first `http`."""

    kind: str
    rank: int = 0

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.rank}" if self.rank else self.kind


class Addresses(msgspec.Struct, frozen=True):
    """Where the inboxes are, as ZMQ endpoints: sockets in one private folder."""

    folder: str

    @property
    def http(self) -> str:
        """The parent's, which hears of every process."""
        return self._at("http")

    @property
    def scheduler(self) -> str:
        """The first rank's, which every message to the engine goes to."""
        return self.of(Process("scheduler"))

    @property
    def publisher(self) -> str:
        return self._at("publisher")

    def of(self, process: Process) -> str:
        return self._at(process.name)

    def _at(self, name: str) -> str:
        return f"ipc://{self.folder}/{name}.ipc"

    def remove(self) -> None:
        """Removes the sockets and the folder; idempotent."""
        shutil.rmtree(self.folder, ignore_errors=True)


class Outbox:
    """Sends to one inbox and never blocks. Messages wait here while the other side is not there yet.

    `limit`: messages that may wait; beyond it, or once closed, `send` returns False and drops. 0 = no limit.
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
        """Closes, giving what still waits `timeout_ms` to leave."""
        self._socket.close(linger=timeout_ms)

    def close(self) -> None:
        self._socket.close(linger=0)


class HeartbeatSender:
    """Tells the parent that `process` moves; `beat` is called whenever its loop comes round."""

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
    """Receives for one process, for use in a plain loop."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, decode: Callable[[bytes], T]) -> None:
        self.socket = context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.bind(address)
        self._decode = decode

    def take(self, limit: int = READ_AT_ONCE) -> list[T]:
        """What has arrived, without waiting."""
        taken: list[T] = []
        while len(taken) < limit:
            try:
                taken.append(self._decode(self.socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                break
        return taken

    def wait(self, timeout_ms: int) -> bool:
        """Blocks until something is there; False after `timeout_ms`."""
        return bool(self.socket.poll(timeout_ms))

    def wait_or(self, fd: int, timeout_ms: int) -> bool:
        """The same, also until a descriptor can be read; → whether it can."""
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(fd, zmq.POLLIN)
        return any(found == fd for found, _ in poller.poll(timeout_ms))

    def close(self) -> None:
        self.socket.close(linger=0)


class AsyncInbox(Generic[T]):
    """The same for an event loop: calls `on_message` in the loop, one message at a time."""

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
