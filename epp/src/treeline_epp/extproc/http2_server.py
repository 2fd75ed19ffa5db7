"""The ext_proc port, on our own HTTP/2: connections, calls, and their turns.

A connection reads its input, lets each call answer its messages, and writes all the answers at once. One read may bring
a hundred requests: after `_TURN_S` the answers so far are written, and the rest goes on in the loop's next round. So
does a call that gives others a turn; a call whose peer does not read waits until it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol, cast

from treeline_epp.extproc.tls import Certificate
from treeline_epp.http2 import grpc
from treeline_epp.http2.connection import Connection
from treeline_epp.http2.events import Came, Event, Limits, Requested, Roomy
from treeline_epp.http2.fields import Fields
from treeline_epp.http2.grpc import CallError, MessageReader, Status

log = logging.getLogger(__name__)

KEEPALIVE_S = 20.0
"""Seconds of silence after which a peer is pinged; after as many more without an answer it is gone."""
_FORGIVEN = 1000
"""Most frames without content in that time."""
_CERTIFICATE_S = 1.0
_ABORT_S = 1.0
"""Time for the loop to report a closed connection, which takes one round."""
_TURN_S = 0.004
"""Seconds of work on one connection before others get a turn; it is not read meanwhile."""
_FRAMES = 256
"""Frames handled at a time."""
_UNREAD_BYTES = 4 << 20
"""Most bytes of ours that a peer may leave unread; beyond that we do not read from it."""
_WAITING_BYTES = 256 * 1024
"""Most bytes of an answer that wait for room at the peer before more is made."""


class Awaited(Protocol):
    """A result that an answer waits for."""

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call this when the result is there. A later callback replaces an earlier one."""
        ...


class Call(Protocol):
    """The server side of one call. It is closed once, however the call ends."""

    @property
    def ended(self) -> bool:
        """Whether the call has no more answers and waits for nothing."""

    @property
    def lingers(self) -> bool:
        """Whether the call has no more answers, but stays open until the peer closes it or the server stops."""

    def answers(self, data: bytes | None) -> Iterator[bytes | Awaited | None]:
        """Answer one message; `data` is None for the last one, if it is larger than the server takes. Yields answers,
        None where others should have a turn, or a result to wait for, which is yielded again if the caller goes on too
        early. Raises CallError, and ValueError for an invalid message.
        """
        ...

    def close(self, *, lost: bool) -> None:
        """End the call. `lost`: its connection has broken, and the peer may or may not go on without us."""


Methods = dict[str, Callable[[Fields], Call]]
"""By `/package.Service/Method`, the function that makes a new call from its header fields."""


class _Running:
    """The state of an open call."""

    __slots__ = ("answering", "call", "closed", "held", "inbox", "owed", "peer_ended", "reader", "timer")

    def __init__(self, call: Call, reader: MessageReader) -> None:
        self.call = call
        self.reader = reader
        self.inbox: deque[bytes | None] = deque()
        self.answering: Iterator[bytes | Awaited | None] | None = None
        self.owed = 0
        """Bytes to credit to the peer when the inbox is empty."""
        self.held = 0
        """Bytes of messages that are incomplete or wait."""
        self.peer_ended = False
        self.closed = False
        self.timer: asyncio.TimerHandle | None = None


class Http2Server:
    """A server that listens, and drains. `methods` are its calls. `most_bytes` bounds a message. `most_held_bytes`
    bounds all messages together that are incomplete, or wait for peers that do not read.
    """

    def __init__(
        self, methods: Methods, most_bytes: int, limits: Limits | None = None, *, most_held_bytes: int = sys.maxsize
    ) -> None:
        self.methods = methods
        self.most_bytes = most_bytes
        self.most_held_bytes = most_held_bytes
        self.held_bytes = self.streams = 0
        self.limits = limits or Limits()
        self.known: OrderedDict[bytes, Fields] = OrderedDict()
        self.peers: set[_Peer] = set()
        self.draining = False
        self._idle = asyncio.Event()
        self._socket: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._following: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int, tls: Certificate | None = None) -> None:
        """Listen. Raises OSError, and the errors of `tls`."""
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._socket = socket.socket(family, kind, protocol)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
            await self._listen(None if tls is None else tls.context())
        except BaseException:
            self._socket.close()
            raise
        if tls is not None:
            self._following = asyncio.create_task(self._follow(tls))

    async def _follow(self, tls: Certificate) -> None:
        """Give new connections the present certificate, as it changes; open ones keep theirs."""
        while True:
            await asyncio.sleep(_CERTIFICATE_S)
            changed = tls.changed()
            if changed is not None:
                await self._listen(changed)

    async def _listen(self, tls: ssl.SSLContext | None) -> None:
        assert self._socket is not None
        before = self._server
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Peer(self), sock=self._socket.dup(), ssl=tls, backlog=1024
        )
        if before is not None:
            before.close()

    @property
    def port(self) -> int:
        """The port on which it listens."""
        assert self._socket is not None
        return cast(int, self._socket.getsockname()[1])

    async def stop(self, grace_s: float | None) -> None:
        """Take no more calls, wait `grace_s` for open ones, and end the rest."""
        self.draining = True
        if self._following is not None:
            self._following.cancel()
        if self._server is not None:
            self._server.close()
        if self._socket is not None:
            self._socket.close()
        for peer in list(self.peers):
            peer.leave()
        await self._until_gone(grace_s or 0)
        for peer in list(self.peers):
            peer.abort()
        await self._until_gone(_ABORT_S)

    async def _until_gone(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.peers:
                    self._idle.clear()
                    await self._idle.wait()

    def gone(self, peer: _Peer) -> None:
        """Forget a closed connection."""
        self.peers.discard(peer)
        self._idle.set()


class _Peer(asyncio.Protocol):
    """One connection."""

    def __init__(self, server: Http2Server) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._connection = Connection(server.limits, server.known)
        self._counted = 0
        """This connection's share of the server's open streams."""
        self._transport: asyncio.Transport | None = None
        self._running: dict[int, _Running] = {}
        self._events: deque[Event] = deque()
        """Events that wait for their turn."""
        self._going_on: asyncio.Handle | None = None
        self._reading = True
        self._full = False
        """Whether the socket's buffer is full."""
        self._heard = True
        self._asked = False
        self._timer: asyncio.TimerHandle | None = None

    # ---- callbacks of asyncio -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server.peers.add(self)
        self._timer = self._loop.call_later(KEEPALIVE_S, self._look_after)
        if self._server.draining:
            self.leave()
        self._flush()

    def connection_lost(self, _error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._going_on is not None:
            self._going_on.cancel()
        self._events.clear()
        for stream in list(self._running):
            self._forget(stream, lost=True)
        self._transport = None
        self._count_streams(0)
        self._server.gone(self)

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        if self._going_on is None:
            self._read(more=True)
        for stream in list(self._running):
            self._go_on(stream)

    def data_received(self, data: bytes) -> None:
        self._heard = True
        self._take_turn(data) if self._going_on is None else self._receive(data)

    def _receive(self, data: bytes) -> None:
        self._connection.room = self._server.limits.all_streams - self._server.streams + self._counted
        self._events += self._connection.receive(data, _FRAMES)
        self._count_streams(len(self._connection))

    def _take_turn(self, data: bytes = b"") -> None:
        """Handle the input until there is no more; if others should have a turn, the loop goes on in its next round."""
        self._going_on = None
        events, until = self._events, self._loop.time() + _TURN_S
        self._receive(data)
        while events or self._connection.more or data:
            if events:
                self._on_event(events.popleft())
            elif self._connection.more:
                self._receive(b"")
            if self._loop.time() > until:
                self._going_on = self._loop.call_soon(self._take_turn)
                break
            data = b""
        self._read(more=self._going_on is None)
        self._flush()

    def _read(self, *, more: bool) -> None:
        if more != self._reading and self._transport is not None and not self._transport.is_closing():
            self._reading = more
            (self._transport.resume_reading if more else self._transport.pause_reading)()

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Came):
            self._on_data(event)
        elif isinstance(event, Requested):
            self._on_request(event)
        elif isinstance(event, Roomy):
            self._work(event.stream)
        else:
            self._forget(event.stream, lost=self._connection.finished)

    # ---- calls --------------------------------------------------------------------------------------------------

    def _on_request(self, event: Requested) -> None:
        stream, fields = event.stream, event.fields
        method = grpc.method_of(fields)
        if method is None:
            self._connection.send(stream, grpc.NOT_GRPC, grpc.NOT_GRPC_BODY)
            self._connection.end(stream, b"")
            return
        opened = self._server.methods.get(method)
        try:
            if opened is None:
                raise CallError(Status.UNIMPLEMENTED, f"there is no method {method[:200]}")
            timeout = grpc.timeout_of(fields)
        except CallError as error:
            self._connection.end(stream, grpc.only(error.status, str(error)))
            return
        call = opened(fields)
        run = _Running(call, MessageReader(self._server.most_bytes))
        self._running[stream] = run
        if timeout is not None:
            run.timer = self._loop.call_later(timeout, self._too_late, stream)
        if event.ended:
            run.peer_ended = True
            self._work(stream)

    def _on_data(self, event: Came) -> None:
        stream = event.stream
        run = self._running.get(stream)
        if run is None:
            return
        run.peer_ended = event.ended
        try:
            run.inbox += run.reader.feed(event.data)
        except CallError as error:
            self._finish(stream, error.status, str(error))
            return
        run.owed += len(event.data)
        if run.answering is None:
            self._work(stream)
        self._count(run)
        if self._server.held_bytes > self._server.most_held_bytes and run.held:
            self._finish(stream, Status.RESOURCE_EXHAUSTED, "too many messages are under way")

    def _count(self, run: _Running) -> None:
        """Count the bytes that its messages keep."""
        held = run.reader.partial_bytes + (run.owed if run.inbox else 0)
        if not run.closed:
            self._server.held_bytes += held - run.held
            run.held = held

    def _work(self, stream: int) -> None:
        """Answer messages until there are none, others should have a turn, or the peer has no room."""
        run = self._running.get(stream)
        if run is None:
            return
        try:
            while True:
                if run.answering is None:
                    if not run.inbox and run.reader.over:
                        raise CallError(Status.RESOURCE_EXHAUSTED, "a message larger than this server takes")
                    if not run.inbox:
                        break
                    run.answering = run.call.answers(run.inbox.popleft())
                if not self._answer(stream, run):
                    return
                run.answering = None
                if run.call.ended or (self._server.draining and run.call.lingers):
                    self._finish(stream, Status.OK)
                    return
        except CallError as error:
            self._finish(stream, error.status, str(error))
            return
        except ValueError as error:
            self._finish(stream, Status.INVALID_ARGUMENT, str(error))
            return
        except Exception as error:
            log.exception("a call failed")
            self._finish(stream, Status.INTERNAL, f"internal error: {error!r}")
            return
        self._connection.read(stream, run.owed)
        run.owed = 0
        self._count(run)
        if run.peer_ended:
            if run.reader.partial_bytes:
                self._finish(stream, Status.INTERNAL, "the last message is not whole")
            else:
                self._finish(stream, Status.OK)

    def _answer(self, stream: int, run: _Running) -> bool:
        """Answer the current message; return whether it is answered."""
        assert run.answering is not None
        if self._full or self._connection.waiting(stream) > _WAITING_BYTES:
            return False
        for answer in run.answering:
            if not isinstance(answer, bytes):
                if answer is None:
                    self._loop.call_soon(self._go_on, stream)
                else:
                    answer.when_done(partial(self._loop.call_soon, self._go_on, stream))
                return False
            self._send(stream, answer)
            if self._connection.waiting(stream) > _WAITING_BYTES:
                return False
        return True

    def _send(self, stream: int, message: bytes) -> None:
        if len(message) < _WAITING_BYTES:
            self._connection.send(stream, grpc.BEGINNING, grpc.prefix(len(message)) + message)
        else:  # avoids a copy
            self._connection.send(stream, grpc.BEGINNING, grpc.prefix(len(message)))
            self._connection.send(stream, grpc.BEGINNING, message)

    def _go_on(self, stream: int) -> None:
        self._work(stream)
        self._flush()

    def _too_late(self, stream: int) -> None:
        self._finish(stream, Status.DEADLINE_EXCEEDED, "the client's time is over")
        self._flush()

    def _finish(self, stream: int, status: Status, why: str = "") -> None:
        if self._connection.begun(stream):
            self._connection.end(stream, grpc.WELL if status is Status.OK else grpc.ending(status, why))
        else:
            self._connection.end(stream, grpc.only(status, why))
        self._forget(stream)

    def _forget(self, stream: int, *, lost: bool = False) -> None:
        run = self._running.pop(stream, None)
        if run is not None:
            if run.timer is not None:
                run.timer.cancel()
            run.answering = None
            self._server.held_bytes -= run.held
            run.held, run.closed = 0, True
            run.call.close(lost=lost)

    # ---- the connection -----------------------------------------------------------------------------------------

    def _flush(self) -> None:
        transport = self._transport
        if transport is None:
            return
        out = self._connection.take()
        self._count_streams(len(self._connection))
        if out:
            transport.write(out[0] if len(out) == 1 else b"".join(out))
            if transport.get_write_buffer_size() > _UNREAD_BYTES:
                self._read(more=False)
        if self._connection.finished or (self._connection.left and not len(self._connection)):
            if self._connection.fault is not None:
                log.info("a connection ends: %s", self._connection.fault)
            transport.close()

    def _count_streams(self, count: int) -> None:
        self._server.streams += count - self._counted
        self._counted = count

    def leave(self) -> None:
        """Take no more calls; open ones go on if they still have answers or the server stays."""
        for stream in [stream for stream, run in self._running.items() if self._server.draining and run.call.lingers]:
            self._finish(stream, Status.OK)
        self._connection.leave()
        self._flush()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def _look_after(self) -> None:
        """Ping a silent peer; one that stays silent is gone."""
        if (self._asked and not self._heard) or not self._connection.settled:
            log.info("a connection ends: its peer is silent")
            self.abort()
            return
        self._asked = not self._heard
        if self._asked:
            self._connection.ping(b"treeline")
            self._flush()
        self._heard = False
        self._connection.forgive(_FORGIVEN)
        self._timer = self._loop.call_later(KEEPALIVE_S, self._look_after)
