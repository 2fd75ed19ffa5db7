"""Reads large bodies in processes of their own, so that no request waits for another one's parsing and tokenizing.

A reader process has no secrets in its environment, a limit of memory and a deadline for each body; one that exceeds
them is replaced, and the body refused. Clients take turns. Two lanes: one takes any body, the other only those of
ordinary length, which therefore never queue behind giants. What takes long there begins again in the first one, where
all bodies of its client stay for a while. The seconds that a client's slow bodies compute are counted: who has used too
many is refused until some have passed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from treeline_runtime.confined.frames import header, receive_frame
from treeline_runtime.models.pooling import Pooling
from treeline_runtime.processes import spawn
from treeline_runtime.server.errors import ApiError, UnknownModel, overloaded
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
"""Of the context: ten times what tokenizing a full one takes."""
BASE_MEMORY_BYTES = 1 << 30
MEMORY_BYTES_PER_TOKEN = 2048
FIRST_TRY_S = 5.0
"""How long the lane for ordinary bodies has for one."""
QUICK_S = 1.0
"""A body that computes no longer costs its client nothing."""
CLIENT_S = 30.0
"""What the slow bodies of a client may compute until it is refused,"""
CLIENT_S_BACK = 0.25
"""and what it gets back of that in each second."""
BUSY_SHARE = 0.1
"""Of its deadline: what a process computes at least where the body is the reason that it is late."""
START_S = 120.0
_ENVIRONMENT = (
    "PATH",
    "PYTHONPATH",
    "PYTHONHOME",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
    "LANG",
    "LC_ALL",
    "TZ",
    "HOME",
)

logger = logging.getLogger(__name__)
_decode = msgspec.msgpack.Decoder(Task | Refused).decode


class ReaderSpec(msgspec.Struct, frozen=True):
    """What a reader process gets when it starts."""

    model_dir: str
    model_name: str
    defaults: SamplingDefaults
    log_level: str
    pooling: Pooling | None = None
    formats: Formats = NO_FORMATS


class Order(msgspec.Struct, frozen=True):
    """What comes before a body, which is the next frame."""

    kind: Kind
    size: int
    """Of the body in bytes."""
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

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class _Gone(Exception):
    """The reader process has ended."""


class ReaderPool:
    """`start`, then `read` any number of times, then `stop`; all in one event loop."""

    def __init__(self, spec: ReaderSpec) -> None:
        self._queue = _Queue()
        self._lanes = [_Lane(spec, self._queue, most) for most in (None, ORDINARY_BYTES)]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(lane.run()) for lane in self._lanes]

    async def stop(self) -> None:
        """Ends the processes and refuses what waits. Idempotent."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        while (body := self._queue.turns.take(lambda _: True)) is not None:
            _finish(body, overloaded("The server is shutting down"))

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
        """What a body asks for. Takes over `reservation`, also where it raises ApiError."""
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
        """Of the processes that are ready to read."""
        return [lane.pid for lane in self._lanes if lane.pid is not None]


class _Queue:
    """The bodies that wait for a lane, and the seconds of their clients."""

    def __init__(self) -> None:
        self.turns = Turns[_PendingBody](MAX_WAITING)
        self.seconds = ClientSeconds(CLIENT_S, CLIENT_S_BACK)
        self._wakes: list[asyncio.Event] = []

    def waking(self) -> asyncio.Event:
        """An event that is set whenever there may be a body."""
        self._wakes.append(asyncio.Event())
        return self._wakes[-1]

    def wake(self) -> None:
        for event in self._wakes:
            event.set()

    def put_back(self, body: _PendingBody) -> None:
        self.turns.put_back(body.client, body)
        self.wake()

    def wait_s(self, client: str | None) -> int:
        """How long a client has to wait that has used too many seconds; a client that the edge has not named is not
        refused for what other unnamed ones did."""
        return 0 if client is None else self.seconds.wait_s(client)

    def charge(self, client: str | None, computed_s: float) -> None:
        """A body has been read, or not. Where its client has used up its seconds, its others are refused."""
        if client is None or computed_s <= QUICK_S:
            return
        self.seconds.charge(client, computed_s)
        if wait_s := self.seconds.wait_s(client):
            for body in self.turns.drop(client):
                _finish(body, _spent(wait_s))


class _Lane:
    """One reader process, replaced as often as need be, and the bodies that it takes."""

    def __init__(self, spec: ReaderSpec, queue: _Queue, most: int | None) -> None:
        """`most`: bytes of the largest body that this lane takes; None = any."""
        self._wake = queue.waking()
        self._spec = spec
        self._queue = queue
        self._most = most
        self._process: subprocess.Popen[bytes] | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._ready = False

    @property
    def pid(self) -> int | None:
        """Of the process, once it is ready to read."""
        return self._process.pid if self._process is not None and self._ready else None

    async def run(self) -> None:
        try:
            while True:
                if self._process is None:
                    await self._start()
                body = await self._next()
                if body is None or self._process is None or self._process.poll() is not None:
                    logger.warning("a reader process ended while it had nothing to do (status %s)", self._end())
                    if body is not None:
                        self._queue.put_back(body)
                else:
                    await self._answer(body)
        finally:
            self._end()

    async def _next(self) -> _PendingBody | None:
        """A body for this lane, or None when the process has ended before there was one."""
        while True:
            body = self._queue.turns.take(self._takes)
            if body is None:
                self._wake.clear()
                if await self._ended_before_wake():
                    return None
            elif body.done.done():  # its client has gone
                body.reservation.release()
            else:
                return body

    def _takes(self, body: _PendingBody) -> bool:
        if self._most is None or body.done.done():
            return True
        is_slow = body.is_slow or (body.client is not None and self._queue.seconds.owed(body.client) > 0)
        return body.size <= self._most and not is_slow

    async def _ended_before_wake(self) -> bool:
        """Waits for `wake`, or for the process to close its socket: it sends nothing while it has no body."""
        waking = asyncio.create_task(self._wake.wait())
        assert self._streams is not None, "the process is ready"
        ending = asyncio.create_task(self._streams[0].read(1))
        try:
            await asyncio.wait({waking, ending}, return_when=asyncio.FIRST_COMPLETED)
            return ending.done()
        finally:
            waking.cancel()
            ending.cancel()
            await asyncio.gather(waking, ending, return_exceptions=True)

    async def _answer(self, body: _PendingBody) -> None:
        context = 0 if body.limits is None else body.limits.context_length
        deadline_s = BASE_DEADLINE_S + DEADLINE_S_PER_TOKEN * context
        first_try = self._most is not None and deadline_s > FIRST_TRY_S
        before_s = self._cpu_s()
        try:
            async with asyncio.timeout(FIRST_TRY_S if first_try else deadline_s):
                payload = await self._ask(body)
            computed_s = self._cpu_s() - before_s
        except _Gone as error:
            status = self._end()
            logger.warning("a reader process was replaced: %s", error)
            # not by us, and perhaps before it took the body
            if status == -signal.SIGKILL and not body.retried:
                body.retried = True
                self._queue.put_back(body)
            else:
                self._queue.charge(body.client, FIRST_TRY_S)  # for the new process, too
                _finish(body, _lost(status, body.size))
        except TimeoutError:
            computed_s = self._cpu_s() - before_s
            self._end()
            if first_try:
                logger.info("a body of %d bytes takes long, and begins again in the other lane", body.size)
                body.is_slow = True
                self._queue.put_back(body)
                self._queue.charge(body.client, computed_s)
                return
            self._queue.charge(body.client, computed_s)
            logger.warning("a reader process was replaced: it computed %.1f s of its %g s", computed_s, deadline_s)
            slow = computed_s < BUSY_SHARE * deadline_s
            _finish(
                body,
                overloaded("The request was not read in time; try again") if slow else too_costly(body.size),
            )
        except BaseException:
            _finish(body, overloaded("The server is shutting down"))
            raise
        else:
            self._queue.charge(body.client, computed_s)
            _finish(body, _decode(payload))

    def _cpu_s(self) -> float:
        """What the process has computed since it started, in seconds."""
        assert self._process is not None, "it has a body"
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def _ask(self, body: _PendingBody) -> bytes:
        assert self._streams is not None, "the process is ready"
        reader, writer = self._streams
        order = msgspec.msgpack.encode(Order(body.kind, body.size, body.limits, body.caller))
        try:
            writer.write(header(len(order)) + order + header(body.size))
            for part in body.parts:
                writer.write(part)
                await writer.drain()
            return await receive_frame(reader)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise _Gone(type(error).__name__) from None

    async def _start(self) -> None:
        """Returns once the process is ready; tries again and again, ever more slowly, where it cannot start."""
        pause_s = 0.5
        while True:
            ours = self._launch()
            try:
                async with asyncio.timeout(START_S):
                    reader, writer = self._streams = await asyncio.open_unix_connection(sock=ours)
                    spec = msgspec.json.encode(self._spec)
                    writer.write(header(len(spec)) + spec)
                    await receive_frame(reader)  # that it is ready
                self._ready = True
                return
            except (OSError, asyncio.IncompleteReadError, TimeoutError):
                if self._streams is None:
                    ours.close()
                status = self._end()
                logger.error("a reader process could not start (status %s); again in %g s", status, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, 30.0)

    def _launch(self) -> socket.socket:
        """Our end of the process's standard input."""
        ours, theirs = socket.socketpair()
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        with theirs:
            self._process = spawn("treeline_runtime.server.reader_process", theirs.fileno(), environment)
        return ours

    def _end(self) -> int | None:
        """Ends the process; its status if it had ended by itself."""
        process, self._process = self._process, None
        self._ready = False
        if process is None:
            return None
        status = process.poll()
        if status is None:
            # one whose socket has closed is about to end
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(0.01)
        if status is None:
            process.kill()
            process.wait()
        streams, self._streams = self._streams, None
        if streams is not None:
            # Through the transport, which forgets the descriptor before it closes it: the next process's may have the
            # same number, and would be forgotten in its stead.
            streams[1].transport.abort()
        return status


def _finish(body: _PendingBody, result: Task | Refused | Exception) -> None:
    body.reservation.release()
    body.parts = ()
    if isinstance(result, Exception):
        body.fail(result)
    elif isinstance(result, Refused):
        body.fail(_as_error(result))
    elif not body.done.done():
        body.done.set_result(result)


def _as_error(refused: Refused) -> ApiError:
    if refused.unknown_model is not None:
        return UnknownModel(refused.unknown_model)
    return ApiError(refused.status, refused.message, type=refused.kind, param=refused.param, code=refused.code)


def _spent(wait_s: int) -> ApiError:
    message = f"Your large requests have taken too long to read: try again in {wait_s} s, or send less at once"
    headers = ((b"retry-after", b"%d" % wait_s),)
    return ApiError(429, message, type="rate_limit_error", code="rate_limit_exceeded", headers=headers)


def _lost(status: int | None, size: int) -> ApiError:
    """What to answer when the process ended with `status` while it had the body."""
    if status == -signal.SIGKILL:  # not by us: the machine is short of memory
        return overloaded("The process that read the request was ended; try again")
    return too_costly(size)


def too_costly(size: int) -> ApiError:
    return ApiError(
        413,
        f"This request of {size} bytes takes more time or memory to read than one request is given; send less at once",
        code="request_too_large",
    )
