"""Executes an order: conversations or calls in an open or closed loop, timed.

A load process is `python -m treeline_bench.serving.worker ORDER REPORT`. It prints `ready`, waits for a line with the
start moment (monotonic clock, ns), prints progress as JSON lines and writes its report to REPORT. Another line, or the
end of its input, ends the load early.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path

import msgspec
import uvloop

from treeline_bench.serving.connection import Connection
from treeline_bench.serving.datasets import joined
from treeline_bench.serving.messages import UNFINISHED, Call, Conversation, LoadReport, Order, Piece, Progress, Record

TICK_S = 0.01
TELL_S = 0.25
GONE_AFTER = 20
"""Refused connections in a row that mean that the server is gone."""
RETRY_S = 0.1
"""The pause between two of them in a closed loop."""


class Worker:
    """An order's connections and records."""

    def __init__(self, order: Order, tell: Callable[[Progress], None]) -> None:
        self.records: list[Record] = []
        self._order, self._tell = order, tell
        self._head = _head(order, order.path, order.headers)
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        heads = (_head(order, call.path, call.headers) for call in order.calls)
        self._requests = [head % len(call.body) + call.body for head, call in zip(heads, order.calls, strict=True)]
        self._next: Iterator[tuple[int, Conversation | Call]] = iter(enumerate(order.conversations))
        if order.calls:
            self._next = islice(cycle(enumerate(order.calls)), order.count)
        self._stopping = asyncio.Event()
        self._ssl = ssl.create_default_context() if order.tls else None
        self._refused = 0
        self._gone = ""
        self._tokens = self._failed = self._ended = 0
        self._lag_ns: list[int] = []
        self._end_ns = 0

    def stop(self) -> None:
        """Sends nothing more and ends running requests: their records say `UNFINISHED`."""
        self._stopping.set()
        for connection in list(self._busy):
            connection.end()

    async def run(self, begin_ns: int) -> LoadReport:
        """Starts at a moment of the monotonic clock; returns when everything has ended."""
        order = self._order
        if order.seconds is not None:
            self._end_ns = begin_ns + int(order.seconds * 1e9)
        await self._until(begin_ns)
        watch = asyncio.create_task(self._watch())
        computed_s = time.process_time()
        try:
            async with asyncio.TaskGroup() as group:  # a bug in one conversation ends all, and is raised
                if order.arrivals is not None:
                    await self._pace(order.arrivals, begin_ns, group)
                else:
                    for _ in range(order.concurrency):
                        group.create_task(self._user())
        finally:
            watch.cancel()
            for connection in [*self._idle, *self._busy]:
                connection.end()
        took_s = max(time.monotonic_ns() - begin_ns, 1) / 1e9
        self._progress()
        await self._look_again()
        busy = (time.process_time() - computed_s) / took_s
        return LoadReport(self.records, begin_ns, self._lag_ns, busy, self._gone)

    # ---- arrivals -------------------------------------------------------------------------------------------

    async def _pace(self, moments: list[float], begin_ns: int, group: asyncio.TaskGroup) -> None:
        """Starts each conversation when it is due, independently of the others."""
        for moment, (index, what) in zip(moments, self._next, strict=not self._order.calls):
            due_ns = begin_ns + int(moment * 1e9)
            if self._end_ns and due_ns >= self._end_ns:
                return
            await self._until(due_ns)
            if not self._more():
                return
            group.create_task(self._carry_out(index, what, due_ns))

    async def _user(self) -> None:
        """One of a fixed number of users: starts the next conversation when its last has ended."""
        for index, what in self._next:
            if not self._more():
                return
            await self._carry_out(index, what, time.monotonic_ns())

    async def _until(self, moment_ns: int) -> None:
        wait_s = (moment_ns - time.monotonic_ns()) / 1e9
        if wait_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), wait_s)

    def _more(self) -> bool:
        if self._stopping.is_set():
            return False
        return not self._end_ns or time.monotonic_ns() < self._end_ns

    # ---- requests -------------------------------------------------------------------------------------------

    async def _carry_out(self, index: int, what: Conversation | Call, due_ns: int) -> None:
        if isinstance(what, Conversation):
            await self._converse(index, what, due_ns)
        else:
            await self._ask(self._requests[index], Record(index, 0, 0, 0, due_ns), events=False)

    async def _converse(self, index: int, conversation: Conversation, due_ns: int) -> None:
        """Sends all turns, each with the turns before it; a failed one ends the conversation."""
        said: list[Piece] = []
        tokens = 0
        for number, turn in enumerate(conversation.turns):
            said.append(turn.piece)
            tokens += turn.piece_tokens
            record = Record(index, number, tokens, turn.output_tokens, due_ns)
            body = self._body(said, turn.output_tokens)
            last = number + 1 == len(conversation.turns)
            answer = await self._ask(self._head % len(body) + body, record, keep_text=not last)
            if record.error or last or not self._more():
                return
            tokens += record.output_tokens
            said.append(self._answer_of(turn.piece, answer, record))
            due_ns = time.monotonic_ns()  # a user who answers at once

    def _answer_of(self, piece: Piece, answer: str, record: Record) -> Piece:
        """The answer in the next prompt: its text; with ids, as many of the question's."""
        if isinstance(piece, str):
            return answer
        return [piece[index % len(piece)] for index in range(record.output_tokens)]

    def _body(self, said: list[Piece], output_tokens: int) -> bytes:
        fields = {**self._order.fields, "max_tokens": output_tokens}
        if not self._order.chat:
            return msgspec.json.encode({**fields, "prompt": joined(said)})
        roles = ("user", "assistant")
        messages = [{"role": roles[index % 2], "content": piece} for index, piece in enumerate(said)]
        return msgspec.json.encode({**fields, "messages": messages})

    async def _ask(self, request: bytes, record: Record, *, keep_text: bool = False, events: bool = True) -> str:
        self.records.append(record)
        record.begun_ns = time.monotonic_ns()
        answer = ""
        connection = await self._connection(record)
        if connection is not None:
            self._busy.add(connection)
            timeout_s = self._order.timeout_s
            answer = await connection.ask(request, record, timeout_s, keep_text=keep_text, events=events)
            self._busy.discard(connection)
            if not connection.closed:
                self._idle.append(connection)
        self._ended += 1
        self._failed += record.error not in ("", UNFINISHED)
        return answer

    async def _connection(self, record: Record) -> Connection | None:
        """A free or new connection. None if impossible; the record says why."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        loop = asyncio.get_running_loop()
        order = self._order
        try:
            async with asyncio.timeout(order.timeout_s):
                _, fresh = await loop.create_connection(
                    lambda: Connection(self._count, order.keep_header), order.host, order.port, ssl=self._ssl
                )
        except OSError as error:  # TimeoutError is one
            record.sent_ns = record.done_ns = time.monotonic_ns()
            record.error, record.detail = "cannot connect", str(error) or type(error).__name__
            await self._on_refused(record.detail)
            return None
        self._refused = 0
        if self._stopping.is_set():
            record.sent_ns = record.done_ns = time.monotonic_ns()
            record.error = UNFINISHED
            fresh.end()
            return None
        return fresh

    async def _on_refused(self, why: str) -> None:
        self._refused += 1
        if self._refused >= GONE_AFTER and not self._gone:
            self._gone = f"{self._refused} connections in a row could not be opened: {why}"
            self.stop()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), RETRY_S)

    async def _look_again(self) -> None:
        """Whether the server is gone: the last requests lost their connections, and none was sent since."""
        last = max(self.records, key=lambda record: record.done_ns, default=None)
        if last is None or last.error != "connection lost" or self._stopping.is_set():
            return
        order = self._order
        try:
            async with asyncio.timeout(order.timeout_s):
                transport, _ = await asyncio.get_running_loop().create_connection(
                    asyncio.Protocol, order.host, order.port
                )
        except OSError as error:
            self._gone = f"connections were lost, and no other could be opened: {error or type(error).__name__}"
        else:
            transport.abort()

    def _count(self, chunks: int) -> None:
        self._tokens += chunks

    # ---- watching -------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Measures timer delays and prints progress."""
        shown_ns = due_ns = time.monotonic_ns()
        while True:
            due_ns = max(due_ns + int(TICK_S * 1e9), time.monotonic_ns())
            await asyncio.sleep((due_ns - time.monotonic_ns()) / 1e9)
            now = time.monotonic_ns()
            self._lag_ns.append(max(0, now - due_ns))
            if now - shown_ns > TELL_S * 1e9:
                shown_ns = now
                self._progress()

    def _progress(self) -> None:
        self._tell(Progress(len(self._busy), self._ended, self._failed, self._tokens))


def _head(order: Order, path: str, headers: dict[str, str]) -> bytes:
    """The bytes before the body; its length is filled in by `%`."""
    host = f"[{order.host}]" if ":" in order.host else order.host
    lines = [f"POST {path} HTTP/1.1", f"host: {host}:{order.port}", "content-type: application/json"]
    lines += ["accept: text/event-stream", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).replace("%", "%%").encode() + b"\r\ncontent-length: %d\r\n\r\n"


# ---- the process --------------------------------------------------------------------------------------------


def main(order_path: str, report_path: str) -> None:
    _allow_many_files()
    order = msgspec.msgpack.decode(Path(order_path).read_bytes(), type=Order)
    # A collection of the whole heap in the middle of a run would be measured as the server's latency.
    gc.collect()
    gc.freeze()
    gc.disable()
    report = uvloop.run(_run(order))
    if report is not None:
        Path(report_path).write_bytes(msgspec.msgpack.encode(report))


async def _run(order: Order) -> LoadReport | None:
    worker = Worker(order, _say)
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    print("ready", flush=True)
    begin = await lines.readline()
    if not begin:
        return None
    stopping = asyncio.create_task(_stop_on_line(lines, worker))
    report = await worker.run(int(begin))
    stopping.cancel()
    return report


async def _stop_on_line(lines: asyncio.StreamReader, worker: Worker) -> None:
    await lines.readline()
    worker.stop()


def _allow_many_files() -> None:
    """A connection is a file, and the usual soft limit is 1,024."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):  # some systems name a hard limit that they do not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _say(progress: Progress) -> None:
    print(msgspec.json.encode(progress).decode(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
