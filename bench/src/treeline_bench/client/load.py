"""Sending a plan's requests and timing the answers.

Callbacks on raw sockets instead of a client library: on a core that Envoy also needs, a library's own cost would be
most of what is measured. Pipelining is off: a connection carries one request at a time, as real clients do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import cast

import httptools

from treeline_bench.client.messages import ClosedLoop, Outcome, Paced, Plan, Report

WATCH_S = 0.25


class _Connection(asyncio.Protocol):
    """One keep-alive connection; `ended` is called once for every request sent."""

    def __init__(self, keep_header: bytes, ended: Callable[[_Connection], None]) -> None:
        self.outcome: Outcome | None = None
        self.closed = False
        self._keep_header, self._ended = keep_header, ended
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none of its subclasses

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(f"not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._finish(f"connection lost: {exc}" if exc else "connection closed")

    # -- httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.outcome is not None and name.lower() == self._keep_header:
            self.outcome.header = value.decode("latin-1")

    def on_message_complete(self) -> None:
        if self.outcome is None:
            return
        self.outcome.status = self._parser.get_status_code()
        if not self._parser.should_keep_alive():
            self.close()
        self._finish("")

    # -- ours

    def send(self, call: int, request: bytes, planned_ns: int) -> None:
        """Write a request; `planned_ns` is when it should have been sent, 0 for now."""
        assert self._transport is not None
        now = time.perf_counter_ns()
        self.outcome = Outcome(call, sent_ns=now, late_ns=max(0, now - planned_ns) if planned_ns else 0)
        self._transport.write(request)

    def fail(self, reason: str) -> None:
        """End the running request with an error, and the connection."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()
        self._finish(reason)

    def close(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.close()

    def _finish(self, error: str) -> None:
        outcome = self.outcome
        if outcome is None:
            return
        outcome.done_ns = time.perf_counter_ns()
        outcome.error = error
        self._ended(self)


class _Run:
    """One plan being carried out. It owns the connections and the outcomes."""

    def __init__(self, plan: Plan) -> None:
        self.outcomes: list[Outcome] = []
        self._plan = plan
        self._requests = [call.request(f"{plan.host}:{plan.port}") for call in plan.calls]
        self._connections: set[_Connection] = set()
        self._idle: list[_Connection] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._sent = self._pending = 0
        self._all_sent = False
        self._end_ns = 0
        self._finished = asyncio.Event()

    async def run(self) -> Report:
        arrivals = self._plan.arrivals
        lanes = arrivals.concurrency if isinstance(arrivals, ClosedLoop) else arrivals.connections
        self._idle = [await self._connect() for _ in range(lanes)]
        if self._plan.seconds is not None:
            self._end_ns = time.perf_counter_ns() + int(self._plan.seconds * 1e9)
        watch = asyncio.create_task(self._watch())
        try:
            if isinstance(arrivals, Paced):
                await self._pace(arrivals.rate_per_s)
            else:
                while self._idle:
                    self._start(self._idle.pop(), 0)
            self._all_sent = True
            self._check_finished()
            await self._finished.wait()
        finally:
            watch.cancel()
            for connection in self._connections:
                connection.close()
        return Report(self.outcomes)

    async def _connect(self) -> _Connection:
        plan = self._plan
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: _Connection(plan.keep_header.encode(), self._ended),
            plan.host,
            plan.port,
        )
        self._connections.add(connection)
        return connection

    def _more(self) -> bool:
        if self._plan.count is not None and self._sent >= self._plan.count:
            return False
        return not self._end_ns or time.perf_counter_ns() < self._end_ns

    def _start(self, connection: _Connection, planned_ns: int) -> None:
        if not self._more():
            return
        call = self._sent % len(self._requests)
        self._sent += 1
        self._pending += 1
        connection.send(call, self._requests[call], planned_ns)

    async def _pace(self, rate_per_s: float) -> None:
        """Send what is due, then sleep until the next is. The loop's timer ticks in ms: `late_ns` shows the effect."""
        gap_ns = 1e9 / rate_per_s
        begin = time.perf_counter_ns()
        planned = 0
        while self._more():
            due_ns = begin + int(planned * gap_ns)
            wait_ns = due_ns - time.perf_counter_ns()
            if wait_ns > 0:
                await asyncio.sleep(wait_ns / 1e9)
            planned += 1
            connection = self._idle.pop() if self._idle else None
            if connection is not None and not connection.closed:
                self._start(connection, due_ns)
            else:
                self._open_then(lambda fresh, due_ns=due_ns: self._start(fresh, due_ns))  # type: ignore[misc]

    def _ended(self, connection: _Connection) -> None:
        assert connection.outcome is not None
        self.outcomes.append(connection.outcome)
        connection.outcome = None
        self._pending -= 1
        if isinstance(self._plan.arrivals, Paced):
            if connection.closed:
                self._connections.discard(connection)
            else:
                self._idle.append(connection)
        elif connection.closed:
            self._connections.discard(connection)
            if self._more():
                self._open_then(lambda fresh: self._start(fresh, 0))
        else:
            self._start(connection, 0)
        self._check_finished()

    def _open_then(self, start: Callable[[_Connection], None]) -> None:
        """Open a connection and use it. A refused one is an outcome too; then the lane ends."""

        async def opening() -> None:
            try:
                fresh = await self._connect()
            except OSError as error:
                now = time.perf_counter_ns()
                self._sent += 1
                call = (self._sent - 1) % len(self._requests)
                self.outcomes.append(Outcome(call, 0, now, now, error=f"cannot connect: {error}"))
            else:
                start(fresh)

        task = asyncio.create_task(opening())
        self._tasks.add(task)
        task.add_done_callback(self._opened)

    def _opened(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._check_finished()

    def _check_finished(self) -> None:
        if self._all_sent and not self._pending and not self._tasks:
            self._finished.set()

    async def _watch(self) -> None:
        """End requests that take too long."""
        while True:
            await asyncio.sleep(WATCH_S)
            oldest = time.perf_counter_ns() - int(self._plan.timeout_s * 1e9)
            for connection in list(self._connections):
                if connection.outcome is not None and connection.outcome.sent_ns < oldest:
                    connection.fail(f"no answer in {self._plan.timeout_s:g} s")


async def carry_out(plan: Plan) -> Report:
    """Send all of `plan`.

    Errors of single requests are outcomes. Raises OSError when the first connections cannot be opened, ValueError for
    a plan without calls or without an end.
    """
    if not plan.calls:
        raise ValueError("a plan needs at least one call")
    if plan.count is None and plan.seconds is None:
        raise ValueError("a plan needs a count or a time to end")
    return await _Run(plan).run()
