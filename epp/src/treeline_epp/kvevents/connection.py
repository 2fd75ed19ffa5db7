"""A connection to one publisher over ZMQ: its live events, its replay socket, its load reports.

One *session* is one set of sockets. A session begins by connecting and ends when a socket loses its peer; the next one
starts with fresh sockets, so that no answer to an old question can arrive in it. The subscription makes all decisions;
here bytes are decoded and fed to it, and its requests are sent.

Thousands of publishers are followed, so a session keeps little: three sockets, and a monitor of the one for events; the
other two are monitored until they are connected. `intake` checks how much each has received without a whole message,
and also notices that one of these two has lost its peer. A session takes up to 13 file descriptors for a moment,
then 8.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from treeline_wire import frames
from treeline_wire.errors import WireError
from treeline_wire.events import DecodeError
from treeline_wire.frames import HelloRequest, ReplayRequest, Request, SnapshotRequest
from treeline_wire.load import LoadStat, TreelineLoad, decode_load
from treeline_wire.security import CurveKeys
from zmq.utils.monitor import parse_monitor_message

from treeline_epp.endpoints.adapters.base import KvSource
from treeline_epp.kvevents.intake import Intake, IntakeError, Turns, receive
from treeline_epp.kvevents.reading import Answer, Numbered, is_large, read_live, read_reply
from treeline_epp.kvevents.subscription import KvSubscription

log = logging.getLogger(__name__)

TICK_S = 0.1
_RETRY_S = 5.0
"""Seconds between attempts to open sockets while no file descriptors are left."""
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_TICKS = 200
"""Publishers that are ticked before other tasks get a turn."""
LOOKED_AT = 100
"""Publishers whose connections are checked in one tick: that takes 10 µs each."""
MOST_BYTES = {"events": 8 << 20, "replay": 8 << 20, "load": 64 << 10}
"""Largest message. A step in which an engine drops a hundred thousand blocks, one event for each, takes as much; a
publisher that sends more loses its connection before it is read."""
_SOCKET_OPTIONS = {
    zmq.LINGER: 0,
    zmq.RCVHWM: 1,  # others wait at the publisher, which keeps thousands; `intake` relies on it
    zmq.SNDHWM: 1000,
    zmq.RECONNECT_IVL: 50,
    zmq.RECONNECT_IVL_MAX: 500,
    # A peer whose machine has vanished closes nothing; the kernel's keepalive notices. ZMQ's own heartbeats would also
    # end a connection whose messages wait here for long, and then its assertion ends the process (libzmq issue 3937).
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 1,
    zmq.TCP_KEEPALIVE_INTVL: 1,
    zmq.TCP_KEEPALIVE_CNT: 3,
    zmq.TCP_MAXRT: 4000,
    zmq.IPV6: 1,
}
_PAUSE_S = 0.05
"""Pause after a session: a peer that accepts and drops must not make a busy loop. Doubled while sessions are short."""
_SHORT_S = 10.0
_PATIENCE_S = 1.0
"""Seconds that the events socket waits for the others before a session begins without them."""
_UP = zmq.Event.HANDSHAKE_SUCCEEDED
_LOST = zmq.Event.DISCONNECTED | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_AUTH
_LOST |= zmq.Event.HANDSHAKE_FAILED_PROTOCOL

Load = LoadStat | TreelineLoad


def new_context() -> zmq.asyncio.Context:
    """Make a context for the sockets of thousands of publishers: ZMQ's default is 1,023 sockets in all."""
    context = zmq.asyncio.Context(io_threads=2)
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
    return context


class Ticker:
    """Calls registered functions every TICK_S, some of them with True: these check their connections. One task for all
    publishers, which also share `turns`.
    """

    def __init__(self) -> None:
        self.turns = Turns()
        self._calls: dict[Callable[[bool], None], None] = {}

    async def run(self) -> None:
        """Run until cancelled."""
        for tick in itertools.count():
            await asyncio.sleep(TICK_S)
            every = 1 + len(self._calls) // LOOKED_AT
            for number, call in enumerate(list(self._calls)):
                if call in self._calls:
                    call((number + tick) % every == 0)
                if number % _TICKS == _TICKS - 1:
                    await asyncio.sleep(0)

    @contextlib.contextmanager
    def calling(self, call: Callable[[bool], None]) -> Iterator[None]:
        """Call this function, too, while the block lasts."""
        self._calls[call] = None
        try:
            yield
        finally:
            del self._calls[call]


@dataclass(slots=True)
class KvStats:
    """Counts over all publishers, for the metrics. `unfollowed` names publishers for which no sockets are left,
    `refused` those that refuse our keys.
    """

    unfollowed: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    events: int = 0
    batches: int = 0
    loads: int = 0
    disconnects: int = 0
    rejected: Counter[str] = field(default_factory=Counter)


class KvCallbacks(msgspec.Struct, frozen=True):
    """The parts of the picker that a connection calls.

    `on_load` takes a report and returns requests for the publisher; `on_trouble` is called when a peer is lost;
    `in_flight` returns how many requests are known to run there.
    """

    subscription: KvSubscription
    on_load: Callable[[Load], Sequence[Request]]
    on_trouble: Callable[[], None]
    in_flight: Callable[[], int]
    stats: KvStats


@dataclass(frozen=True, slots=True)
class KvConnection:
    """Follows one publisher until cancelled. `curve` is required if the source says so."""

    context: zmq.asyncio.Context
    ticker: Ticker
    source: KvSource
    callbacks: KvCallbacks
    curve: CurveKeys | None

    async def run(self) -> None:
        """Run session after session."""
        pause = _PAUSE_S
        try:
            while True:
                began = time.monotonic()
                await self._session(pause)
                pause = min(2 * pause, _RETRY_S) if time.monotonic() - began < _SHORT_S + pause else _PAUSE_S
        finally:
            name = str(self.callbacks.subscription.pod)
            self.callbacks.stats.unfollowed.discard(name)
            self.callbacks.stats.refused.discard(name)

    async def _session(self, pause: float) -> None:
        callbacks, name = self.callbacks, str(self.callbacks.subscription.pod)
        sockets = _Sockets(self.ticker, callbacks, self.curve)
        try:
            sockets.open(self.context, self.source)
            callbacks.stats.unfollowed.discard(name)
            await sockets.run()
        except zmq.ZMQError as error:
            if error.errno not in _NO_ROOM:
                raise
            if name not in callbacks.stats.unfollowed:
                log.error("publisher %s cannot be followed: %s; give the picker more file descriptors", name, error)
            callbacks.stats.unfollowed.add(name)
            sockets.close()
            await asyncio.sleep(_RETRY_S * random.uniform(0.8, 1.2))
        else:
            sockets.close()
            await sockets.settle()
            callbacks.stats.disconnects += 1
            log.warning("publisher %s: its events ended: %s", name, sockets.why)
            callbacks.subscription.on_disconnected(time.monotonic())
            callbacks.on_trouble()
            await asyncio.sleep(pause)
        finally:
            sockets.close()


class _Sockets:
    """One set of sockets: `open` it, `run` it, and `close` it in any case."""

    def __init__(self, ticker: Ticker, callbacks: KvCallbacks, curve: CurveKeys | None) -> None:
        self._ticker = ticker
        self._callbacks = callbacks
        self._curve = curve
        self._sockets: dict[str, zmq.asyncio.Socket] = {}
        self._monitors: dict[str, zmq.asyncio.Socket] = {}
        self._up: dict[str, asyncio.Event] = {}
        self._intakes: dict[str, Intake] = {}
        self._lost = asyncio.Event()
        self.why = ""
        self._treeline_load = False
        self._doing: set[asyncio.Task[None]] = set()

    def open(self, context: zmq.asyncio.Context, source: KvSource) -> None:
        """Make the sockets and connect them. Raises `zmq.ZMQError` if the process has too many."""
        host = f"[{source.host}]" if ":" in source.host else source.host
        for what, kind, port, topic in (
            ("events", zmq.SUB, source.events_port, source.topic),
            ("replay", zmq.DEALER, source.replay_port, None),
            ("load", zmq.SUB, source.load_port, ""),
        ):
            if port is None:
                continue
            sock = self._sockets[what] = context.socket(kind)
            for option, value in _SOCKET_OPTIONS.items():
                sock.setsockopt(option, value)
            sock.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES[what])
            if self._curve is not None:
                self._curve.secure_client(sock)
            if topic is not None:
                sock.subscribe(topic)
            self._up[what] = asyncio.Event()
            self._intakes[what] = Intake(MOST_BYTES[what])
            self._monitors[what] = sock.get_monitor_socket(zmq.Event.CONNECTED | _UP | _LOST)
            sock.connect(f"tcp://{host}:{port}")

    def close(self) -> None:
        """Close every socket and drop unsent messages."""
        for what in list(self._monitors):
            self._unmonitor(what)
        while self._sockets:
            self._sockets.popitem()[1].close(0)

    def _unmonitor(self, what: str) -> None:
        monitor = self._monitors.pop(what)
        self._sockets[what].disable_monitor()
        monitor.close(0)

    async def run(self) -> None:
        """Handle what arrives; returns when the peer is lost."""
        handlers: dict[str, tuple[Callable[[list[bytes]], Any], Callable[[Any], Iterable[Request]]]] = {
            "events": (read_live, self._on_live),
            "replay": (read_reply, self._on_reply),
            "load": (_read_load, self._on_load),
        }
        jobs = [self._receive(what, *handlers[what]) for what in self._sockets]
        tasks = [asyncio.ensure_future(job) for job in (*jobs, self._keep_time(), self._lost.wait())]
        monitors = [asyncio.ensure_future(self._monitor(what)) for what in self._monitors]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises its error
        finally:
            tasks += [*monitors, *self._doing]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_time(self) -> None:
        """Wait for the connections, then tick."""
        subscription = self._callbacks.subscription
        if "events" in self._up:
            await self._up["events"].wait()
            waiting = [event.wait() for what, event in self._up.items() if what != "events"]
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    await asyncio.gather(*waiting)
            except TimeoutError:
                missing = [what for what, event in self._up.items() if not event.is_set()]
                log.warning("publisher %s: no connection for %s", subscription.pod, ", ".join(missing))
            await self._do(lambda: subscription.on_connected(time.monotonic()))
        with self._ticker.calling(self._tick):
            await asyncio.Event().wait()

    async def settle(self) -> None:
        """Wait until all received batches are in the index."""
        await self._do(lambda: ())

    async def _do(self, job: Callable[[], Iterable[Request]]) -> None:
        """Run a job when no work waits any more, then the work that it leaves; send the requests of both."""
        subscription, done = self._callbacks.subscription, False
        while not done or subscription.busy:
            async with self._ticker.turns:
                if subscription.busy:
                    requests: Iterable[Request] = subscription.on_turn(time.monotonic())
                else:
                    requests, done = job(), True
            await self._send(requests)

    def _end(self, why: str) -> None:
        self.why = self.why or why
        self._lost.set()

    def _tick(self, look: bool) -> None:
        callbacks = self._callbacks
        for what, intake in self._intakes.items() if look else ():
            try:
                intake.look()
            except IntakeError as error:
                self._end(f"{error} ({what})")
        if callbacks.subscription.busy:
            return
        requests = callbacks.subscription.on_tick(time.monotonic(), callbacks.in_flight())
        if requests or callbacks.subscription.busy:
            doing = asyncio.ensure_future(self._do(lambda: requests))
            self._doing.add(doing)
            doing.add_done_callback(self._doing.discard)

    async def _monitor(self, what: str) -> None:
        """Wait until a socket is connected; for the events socket, end the session when its connection is lost."""
        monitor, up, most, fd = self._monitors[what], self._up[what], MOST_BYTES[what], -1
        # ZMQ reports a lost connection before it closes its file. So if no report follows `begin`, the file is the
        # connection's, and not another one that got the same number.
        while what == "events" or not up.is_set() or await monitor.poll(0):
            event = parse_monitor_message(await monitor.recv_multipart())
            stats, name = self._callbacks.stats, str(self._callbacks.subscription.pod)
            if event["event"] == zmq.Event.CONNECTED:
                fd = event["value"]
            elif event["event"] & _UP:
                try:
                    self._intakes[what].begin(fd)
                except IntakeError as error:
                    self._end(f"{error} ({what})")
                up.set()
                stats.refused.discard(name)
            elif up.is_set():
                self._end(f"it is gone, or sent a message of over {most} bytes")
            elif event["event"] & ~zmq.Event.DISCONNECTED & _LOST:
                stats.refused.add(name)
                log.warning("publisher %s: the %s socket refuses our keys", name, what)
        self._unmonitor(what)

    async def _receive(
        self,
        what: str,
        read: Callable[[list[bytes]], Any],
        take: Callable[[Any], Iterable[Request]],
    ) -> None:
        """Receive every message, read it, and pass it on."""
        sock = self._sockets[what]
        # The plain view of the same socket: it takes waiting messages without a future for each.
        plain: zmq.Socket[bytes] = zmq.Socket.shadow(sock.underlying)

        def read_frames(parts: Sequence[zmq.Frame]) -> Any:
            return read([part.bytes for part in parts])

        def take_frames(parts: Sequence[zmq.Frame]) -> Iterable[Request]:
            return take(read_frames(parts))

        while True:
            try:
                message = receive(plain, MOST_BYTES[what])
                self._intakes[what].read = True
                if is_large(message):
                    came = await asyncio.to_thread(read_frames, message)
                    await self._do(partial(take, came))
                else:
                    await self._do(partial(take_frames, message))
            except zmq.Again:
                await sock.poll()
            except IntakeError as error:
                return self._end(f"{error} ({what})")
            except WireError as error:
                reason = error.reason.value if isinstance(error, DecodeError) else "frames"
                self._callbacks.stats.rejected[reason] += 1
                log.debug("message refused: %s", error)

    async def _send(self, requests: Iterable[Request]) -> None:
        replay = self._sockets.get("replay")
        for request in requests:
            if replay is None:
                return
            match request:
                case HelloRequest():
                    message = frames.hello_request()
                case ReplayRequest(start_seq=start):
                    message = frames.replay_request(start)
                case SnapshotRequest():
                    message = frames.snapshot_request()
            await replay.send_multipart(message)

    # --- one for each socket ------------------------------------------------------------------------------------------

    def _on_live(self, came: Numbered) -> Iterable[Request]:
        stats = self._callbacks.stats
        if came.refusal is not None:
            stats.rejected[came.refusal.value] += 1
        if came.batch is not None:
            stats.batches += 1
            stats.events += came.events
            stats.rejected.update(came.batch.rejected)
        return self._callbacks.subscription.on_live(came.seq, came.batch, time.monotonic())

    def _on_reply(self, answer: Answer) -> Iterable[Request]:
        return self._callbacks.subscription.on_reply(answer, time.monotonic())

    def _on_load(self, load: Load) -> Iterable[Request]:
        self._callbacks.stats.loads += 1
        if isinstance(load, TreelineLoad):
            self._treeline_load = True
        elif self._treeline_load:
            return ()  # the same state in the older form, with fewer fields
        return self._callbacks.on_load(load)


def _read_load(message: Sequence[bytes]) -> Load:
    """Decode a load report. Raises `DecodeError`."""
    return decode_load(message[0], message[-1])
