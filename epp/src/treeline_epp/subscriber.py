"""The ZMQ driver of one publisher: its live events, its replay socket, its load reports.

One *session* is one set of sockets. A session begins by connecting and ends when a socket loses its peer; the next one
starts with fresh sockets, so that no answer to an old question can arrive in it. All decisions are the
:class:`~treeline_epp.publisher.Publisher`'s; here bytes are decoded, fed to it, and its actions sent.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from treeline_wire import frames
from treeline_wire.errors import WireError
from treeline_wire.events import DecodeError, EventBatch, decode_batch
from treeline_wire.load import LoadStat, TreelineLoad, decode_load
from treeline_wire.security import CurveKeys
from zmq.utils.monitor import parse_monitor_message

from treeline_epp.engines import KvSource
from treeline_epp.publisher import Action, Publisher, SendHello, SendReplay, SendSnapshot

log = logging.getLogger(__name__)

TICK_S = 0.1
_BATCH = 64
"""Messages handled before other tasks get a turn: a snapshot must not delay a pick."""
_QUEUE = 100_000
"""High-water mark, in messages, like the publishers' own."""
_SOCKET_OPTIONS = {
    zmq.LINGER: 0,
    zmq.RCVHWM: _QUEUE,
    zmq.SNDHWM: _QUEUE,
    zmq.RECONNECT_IVL: 50,
    zmq.RECONNECT_IVL_MAX: 500,
    # A peer whose machine has vanished closes nothing; heartbeats notice.
    zmq.HEARTBEAT_IVL: 1000,
    zmq.HEARTBEAT_TIMEOUT: 3000,
    zmq.IPV6: 1,
}
_PATIENCE_S = 1.0
"""How long the events socket waits for the others before a session begins without them."""
_UP = zmq.Event.HANDSHAKE_SUCCEEDED
_LOST = zmq.Event.DISCONNECTED | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_AUTH
_LOST |= zmq.Event.HANDSHAKE_FAILED_PROTOCOL

Load = LoadStat | TreelineLoad


class Stats:
    """What arrived, over all publishers; read by the metrics."""

    def __init__(self) -> None:
        self.events = 0
        self.batches = 0
        self.loads = 0
        self.disconnects = 0
        self.rejected: Counter[str] = Counter()


class Wiring(msgspec.Struct, frozen=True):
    """What a subscriber is connected to inside the picker.

    ``on_load`` takes a report and returns actions for the publisher; ``on_trouble`` hears that a peer was lost;
    ``in_flight`` tells how many requests are known to run there.
    """

    publisher: Publisher
    on_load: Callable[[Load], Sequence[Action]]
    on_trouble: Callable[[], None]
    in_flight: Callable[[], int]
    stats: Stats
    clock: Callable[[], float] = time.monotonic


class Subscriber:
    """Follows one publisher until cancelled. ``curve`` is required if the source says so."""

    def __init__(
        self, context: zmq.asyncio.Context, source: KvSource, wiring: Wiring, curve: CurveKeys | None
    ) -> None:
        self._context = context
        self._source = source
        self._wiring = wiring
        self._curve = curve

    async def run(self) -> None:
        """Session after session."""
        wiring = self._wiring
        while True:
            session = _Session(self._context, self._source, wiring, self._curve)
            try:
                await session.run()
            finally:
                session.close()
            wiring.stats.disconnects += 1
            wiring.publisher.on_disconnected(wiring.clock())
            wiring.on_trouble()
            await asyncio.sleep(0.05)  # a peer that accepts and drops must not make a busy loop


class _Session:
    """One set of sockets."""

    def __init__(
        self, context: zmq.asyncio.Context, source: KvSource, wiring: Wiring, curve: CurveKeys | None
    ) -> None:
        self._wiring = wiring
        self._curve = curve
        self._sockets: list[zmq.asyncio.Socket] = []
        self._up: dict[str, asyncio.Event] = {}
        self._lost = asyncio.Event()
        self._treeline_load = False
        host = f"[{source.host}]" if ":" in source.host else source.host
        self._monitors: list[tuple[str, zmq.asyncio.Socket]] = []

        def connect(
            what: str, kind: int, port: int | None, topic: str | None = None
        ) -> zmq.asyncio.Socket | None:
            if port is None:
                return None
            sock = context.socket(kind)
            self._sockets.append(sock)
            for option, value in _SOCKET_OPTIONS.items():
                sock.setsockopt(option, value)
            if curve is not None:
                curve.secure_client(sock)
            if topic is not None:
                sock.subscribe(topic)
            self._up[what] = asyncio.Event()
            self._monitors.append((what, sock.get_monitor_socket(_UP | _LOST)))
            sock.connect(f"tcp://{host}:{port}")
            return sock

        self._events = connect("events", zmq.SUB, source.events_port, source.topic)
        self._replay = connect("replay", zmq.DEALER, source.replay_port)
        self._load = connect("load", zmq.SUB, source.load_port, "")

    def close(self) -> None:
        """Close every socket, unsent messages and all."""
        for sock in self._sockets:
            sock.disable_monitor()
            sock.close(0)

    async def run(self) -> None:
        """Connect, then handle what arrives; returns when a peer is lost."""
        handlers = [
            (self._events, self._on_live),
            (self._replay, self._on_reply),
            (self._load, self._on_load),
        ]
        jobs = [self._monitor(what, sock) for what, sock in self._monitors]
        jobs += [self._receive(sock, handler) for sock, handler in handlers if sock is not None]
        tasks = [asyncio.ensure_future(job) for job in (*jobs, self._keep_time())]
        lost = asyncio.ensure_future(self._lost.wait())
        try:
            done, _ = await asyncio.wait((*tasks, lost), return_when=asyncio.FIRST_COMPLETED)
            for task in done - {lost}:
                task.result()  # a receiver never ends: this raises what ended it
        finally:
            for task in (*tasks, lost):
                task.cancel()
            await asyncio.gather(*tasks, lost, return_exceptions=True)

    async def _keep_time(self) -> None:
        """Wait for the connections, then tick."""
        publisher, clock = self._wiring.publisher, self._wiring.clock
        if self._events is not None:
            await self._up["events"].wait()
            waiting = [event.wait() for what, event in self._up.items() if what != "events"]
            try:
                await asyncio.wait_for(asyncio.gather(*waiting), _PATIENCE_S)
            except TimeoutError:
                missing = [what for what, event in self._up.items() if not event.is_set()]
                log.warning("publisher %s: no connection for %s", publisher.pod, ", ".join(missing))
            await self._perform(publisher.on_connected(clock()))
        while True:
            await asyncio.sleep(TICK_S)
            await self._perform(publisher.on_tick(clock(), self._wiring.in_flight()))

    async def _monitor(self, what: str, monitor: zmq.asyncio.Socket) -> None:
        while True:
            event = parse_monitor_message(await monitor.recv_multipart())
            if event["event"] & _UP:
                self._up[what].set()
            elif self._up[what].is_set():
                self._lost.set()
            elif event["event"] & ~zmq.Event.DISCONNECTED & _LOST:
                log.warning("publisher %s: the %s socket refuses our keys", self._wiring.publisher.pod, what)

    async def _receive(
        self, sock: zmq.asyncio.Socket, handle: Callable[[list[bytes]], Iterable[Action]]
    ) -> None:
        """Hand every message to its handler, a bounded number at a time."""
        # The plain view of the same socket: taking what is there costs no future per message.
        plain: zmq.Socket[bytes] = zmq.Socket.shadow(sock.underlying)
        while True:
            await sock.poll()
            for _ in range(_BATCH):
                try:
                    message: Any = plain.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                await self._perform(handle(message))
            await asyncio.sleep(0)

    async def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if self._replay is None:
                return
            match action:
                case SendHello():
                    request = frames.hello_request()
                case SendReplay(start_seq=start):
                    request = frames.replay_request(start)
                case SendSnapshot():
                    request = frames.snapshot_request()
            await self._replay.send_multipart(request)

    # --- one handler for each socket ----------------------------------------------------------------------------------

    def _on_live(self, message: list[bytes]) -> Iterable[Action]:
        stats, now = self._wiring.stats, self._wiring.clock()
        try:
            _, seq, payload = frames.parse_live(message)
        except WireError as error:
            stats.rejected["frames"] += 1
            log.debug("live message refused: %s", error)
            return ()
        batch: EventBatch | None
        try:
            batch = decode_batch(payload)
        except DecodeError as error:
            stats.rejected[error.reason.value] += 1
            batch = None
        else:
            stats.batches += 1
            stats.events += len(batch.events)
            stats.rejected.update(batch.rejected)
        return self._wiring.publisher.on_live(seq, batch, now)

    def _on_reply(self, message: list[bytes]) -> Iterable[Action]:
        try:
            reply = frames.parse_reply(message)
        except WireError as error:
            self._wiring.stats.rejected["frames"] += 1
            log.debug("reply refused: %s", error)
            return ()
        return self._wiring.publisher.on_reply(reply, self._wiring.clock())

    def _on_load(self, message: list[bytes]) -> Iterable[Action]:
        stats = self._wiring.stats
        try:
            load = decode_load(message[0], message[-1])
        except DecodeError as error:
            stats.rejected[error.reason.value] += 1
            return ()
        stats.loads += 1
        if isinstance(load, TreelineLoad):
            self._treeline_load = True
        elif self._treeline_load:
            return ()  # the same state in the older form, which says less
        return self._wiring.on_load(load)
