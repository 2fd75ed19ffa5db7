"""Reads large bodies in other processes, so that no request waits for another's parsing and tokenizing.

A reader process has no secrets in its environment, a memory limit and a deadline per body; beyond these it is replaced
and the body refused. Clients take turns. One of two lanes takes only bodies of ordinary length, so that these never
queue behind giants. A slow one starts over in the other lane, where its client's bodies then stay for a while. CPU
seconds of slow bodies are counted, and a client that used too many is refused until some have come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from treeline_runtime.confined.child import ProcessLimits
from treeline_runtime.confined.pool import ConfinedPool, PoolClosedError
from treeline_runtime.confined.process import ConfinedProcess, Killed, Late, Vanished
from treeline_runtime.media.sources import MediaRules
from treeline_runtime.models.pooling import Pooling
from treeline_runtime.server.errors import ApiError, overloaded, rate_limited
from treeline_runtime.server.formats import NO_FORMATS, Formats
from treeline_runtime.server.jobs import Caller, Kind, Refused, Task
from treeline_runtime.server.limits import Limits, Reservation
from treeline_runtime.server.sampling import SamplingDefaults
from treeline_runtime.turns import ClientSeconds, Turns

ORDINARY_BYTES = 1 << 20
MAX_WAITING = 1024
"""Bodies that may wait for a reader."""
BASE_DEADLINE_S = 20.0
DEADLINE_S_PER_TOKEN = 20e-6
"""Seconds per token of the context: ten times the tokenizing of a full one."""
BASE_MEMORY_BYTES = 1 << 30
MEMORY_BYTES_PER_TOKEN = 2048
FIRST_TRY_S = 5.0
"""Seconds for a body in the ordinary lane."""
QUICK_S = 1.0
"""Faster bodies cost their client nothing."""
CLIENT_S = 30.0
"""Seconds that a client's slow bodies may use before it is refused,"""
CLIENT_S_BACK = 0.25
"""and how many come back each second."""
BUSY_SHARE = 0.1
"""Share of the deadline that a process computes, if the body itself is the reason for being late."""
START_S = 120.0
"""Seconds for a process to start and load the tokenizer."""
PAUSE_S = 0.5
"""Seconds to wait after a process that could not start, doubled each time,"""
MAX_PAUSE_S = 30.0
"""up to this."""
ORDER_HEADER = struct.Struct(">I")
"""Precedes an `Order`: the order's length in bytes."""

logger = logging.getLogger(__name__)
_STOPPING = "The server is shutting down"
_NO_READER = "No process can be started to read large requests; the server's log says why"
_decode = msgspec.msgpack.Decoder(Task | Refused).decode


class ReaderSpec(msgspec.Struct, frozen=True):
    """The arguments of a reader process."""

    model_dir: str
    model_name: str
    defaults: SamplingDefaults
    log_level: str
    pooling: Pooling | None = None
    formats: Formats = NO_FORMATS
    log_format: str | None = None
    media: MediaRules | None = None


class Order(msgspec.Struct, frozen=True):
    """A job for a reader process; the body follows it."""

    kind: Kind
    size: int
    """Bytes of the body."""
    limits: Limits | None
    caller: Caller


@dataclass
class _PendingBody:
    kind: Kind
    parts: Sequence[bytes]
    size: int
    limits: Limits | None
    caller: Caller
    reservation: Reservation
    client: str | None
    retried: bool = False
    is_slow: bool = False
    """It has outlasted its first try."""
    done: asyncio.Future[Task] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class ReaderPool:
    """`start`, any number of `read`, then `stop`; all in one event loop."""

    def __init__(self, spec: ReaderSpec) -> None:
        self._queue = _Queue()
        self._processes = ConfinedPool(partial(_Process, spec))
        self._lanes = [_Lane(self._processes, self._queue, most) for most in (None, ORDINARY_BYTES)]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(lane.run()) for lane in self._lanes]

    async def stop(self) -> None:
        """Ends the processes and refuses waiting bodies. Idempotent."""
        self._processes.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._queue.refuse(_STOPPING)

    async def read(
        self,
        kind: Kind,
        parts: Sequence[bytes],
        size: int,
        limits: Limits | None,
        caller: Caller,
        reservation: Reservation,
        client: str | None = None,
    ) -> Task:
        """Reads a body in another process. Takes over `reservation`, also if it raises ApiError."""
        body = _PendingBody(kind, parts, size, limits, caller, reservation, client)
        dropped: _PendingBody | None = body
        if wait_s := self._queue.wait_s(client):
            _finish(body, _spent(wait_s))
        elif (dropped := self._queue.turns.put(client, body)) is not None:
            _finish(dropped, overloaded("Too many large requests are waiting to be read"))
        self._queue.wake()
        done = body.done
        del body, dropped, parts  # an error's traceback keeps this frame, and would keep the body
        return await done  # cancelled with its request; the lane drops it, or finishes it unused

    @property
    def pids(self) -> list[int]:
        return [lane.process.pid for lane in self._lanes if lane.process is not None]


class _Queue:
    """Bodies waiting for a lane, and their clients' seconds."""

    def __init__(self) -> None:
        self.turns = Turns[_PendingBody](MAX_WAITING)
        self.seconds = ClientSeconds(CLIENT_S, CLIENT_S_BACK)
        self._wakes: list[asyncio.Event] = []

    def waking(self) -> asyncio.Event:
        """An event set whenever there may be a body."""
        self._wakes.append(asyncio.Event())
        return self._wakes[-1]

    def wake(self) -> None:
        for event in self._wakes:
            event.set()

    def put_back(self, body: _PendingBody) -> None:
        self.turns.put_back(body.client, body)
        self.wake()

    def refuse(self, why: str) -> None:
        """Refuses all bodies."""
        while (body := self.turns.take(lambda _: True)) is not None:
            _finish(body, overloaded(why))

    def wait_s(self, client: str | None) -> int:
        """Seconds until a client that used too many may continue; unnamed clients are not refused for each other's."""
        return 0 if client is None else self.seconds.wait_s(client)

    def charge(self, client: str | None, computed_s: float) -> None:
        """A body ended. If its client has used up its seconds, its waiting ones are refused."""
        if client is None or computed_s <= QUICK_S:
            return
        self.seconds.charge(client, computed_s)
        if wait_s := self.seconds.wait_s(client):
            for body in self.turns.drop(client):
                _finish(body, _spent(wait_s))


class _Process(ConfinedProcess):
    """Reads one body at a time. Its environment is empty; it may start processes to render templates."""

    def __init__(self, spec: ReaderSpec) -> None:
        limits = ProcessLimits(0, 0, starts_processes=True, ends_with_thread=True)
        super().__init__("treeline_runtime.server.reader_process", limits, logs=True)
        self._spec = spec

    def wait_ready(self, seconds: float = START_S) -> None:
        super().wait_ready(seconds)
        try:
            self.ask(msgspec.json.encode(self._spec), seconds=seconds)
        except Killed as error:
            raise OSError(str(error)) from error

    def read(self, body: _PendingBody, seconds: float) -> Task | Refused:
        """Raises Killed."""
        order = msgspec.msgpack.encode(Order(body.kind, body.size, body.limits, body.caller))
        try:
            return _decode(self.ask(ORDER_HEADER.pack(len(order)), order, *body.parts, seconds=seconds))
        except msgspec.MsgspecError:
            raise Killed("it answered nonsense") from None


class _Lane:
    """Takes bodies and has a process read them, replaced whenever necessary."""

    def __init__(self, processes: ConfinedPool[_Process], queue: _Queue, most: int | None) -> None:
        """`most`: the largest body of this lane in bytes; None = any."""
        self._wake = queue.waking()
        self._processes = processes
        self._queue = queue
        self._most = most
        self.process: _Process | None = None
        """The process, once it is ready."""

    async def run(self) -> None:
        """Runs until the pool is closed. If no process can start, it retries ever more slowly, and refuses what waits
        each time but the first."""
        pause_s = PAUSE_S
        while True:
            try:
                with contextlib.ExitStack() as stack:
                    self.process = await asyncio.to_thread(stack.enter_context, self._processes.lend())
                    pause_s = PAUSE_S
                    while True:
                        await self._answer(self.process, await self._next(self.process))
            except PoolClosedError:
                return
            except Killed as error:
                logger.warning("a reader process was replaced: %s", error)
            except (OSError, RuntimeError) as error:  # no process or thread can be started
                logger.error("a reader process could not start (%s); again in %g s", error, pause_s)
                if pause_s > PAUSE_S:
                    self._queue.refuse(_NO_READER)
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, MAX_PAUSE_S)
            finally:
                self.process = None

    async def _next(self, process: _Process) -> _PendingBody:
        """A body for this lane. Raises Killed if the process ends before."""
        while process.alive():
            body = self._queue.turns.take(self._takes)
            if body is None:
                self._wake.clear()
                with _end_wakes(process, self._wake):
                    await self._wake.wait()
            elif body.done.done():  # its client has gone
                body.reservation.release()
            else:
                return body
        raise Killed("it ended while idle")

    def _takes(self, body: _PendingBody) -> bool:
        if self._most is None or body.done.done():
            return True
        is_slow = body.is_slow or (body.client is not None and self._queue.seconds.owed(body.client) > 0)
        return body.size <= self._most and not is_slow

    async def _answer(self, process: _Process, body: _PendingBody) -> None:
        """Raises Killed if the process must be replaced."""
        context = 0 if body.limits is None else body.limits.context_length
        deadline_s = BASE_DEADLINE_S + DEADLINE_S_PER_TOKEN * context
        first_try = self._most is not None and deadline_s > FIRST_TRY_S
        try:
            before_s = process.cpu_s()
            read = await asyncio.to_thread(process.read, body, FIRST_TRY_S if first_try else deadline_s)
            self._queue.charge(body.client, process.cpu_s() - before_s)
            _finish(body, read)
        except Late:
            computed_s = process.cpu_s() - before_s
            if first_try:  # it begins again in the other lane
                body.is_slow = True
                self._queue.put_back(body)
            else:
                fault = computed_s >= BUSY_SHARE * deadline_s
                late = overloaded("The request was not read in time; try again")
                _finish(body, too_costly(body.size) if fault else late)
            self._queue.charge(body.client, computed_s)
            await asyncio.to_thread(process.kill)  # which takes a while where it has much memory
            raise Killed(f"it computed {computed_s:.1f} s for a body of {body.size} bytes") from None
        except Killed as error:
            vanished = isinstance(error, Vanished)  # perhaps before it took the body
            if vanished and not body.retried:
                body.retried = True
                self._queue.put_back(body)
            else:
                self._queue.charge(body.client, FIRST_TRY_S)  # for the new process, too
                lost = overloaded("The process that read the request was ended; try again")
                _finish(body, lost if vanished else too_costly(body.size))
            raise
        except BaseException:
            _finish(body, overloaded(_STOPPING))
            raise


@contextlib.contextmanager
def _end_wakes(process: _Process, wake: asyncio.Event) -> Iterator[None]:
    """Sets the event when the process ends."""
    loop, descriptor = asyncio.get_running_loop(), process.fileno()
    loop.add_reader(descriptor, wake.set)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)


def _finish(body: _PendingBody, result: Task | Refused | ApiError) -> None:
    body.reservation.release()
    body.parts = ()
    if body.done.done():
        return
    if isinstance(result, Refused):
        result = result.error()
    if isinstance(result, ApiError):
        body.done.set_exception(result)
    else:
        body.done.set_result(result)


def _spent(wait_s: int) -> ApiError:
    message = f"Your large requests have taken too long to read: try again in {wait_s} s, or send less at once"
    return rate_limited(message, ((b"retry-after", b"%d" % wait_s),))


def too_costly(size: int) -> ApiError:
    return ApiError(
        413,
        f"This request of {size} bytes takes too much time or memory to read; send less at once",
        code="request_too_large",
    )
