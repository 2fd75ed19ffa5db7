"""The ext_proc port's driver with answers that wait for something, and grpcio's client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import grpc
from treeline_epp.extproc.http2_server import Awaited, Http2Server
from treeline_epp.http2.fields import Fields

METHOD = "/test.Held/Process"


class Gate:
    """A gate that the test opens. `asked` counts the waiting callers."""

    def __init__(self) -> None:
        self.open = False
        self.asked = asyncio.Semaphore(0)
        self._callback: Callable[[], object] | None = None

    def when_done(self, callback: Callable[[], object]) -> None:
        self.asked.release()
        self._callback = callback

    def let_go(self) -> None:
        self.open = True
        if self._callback is not None:
            self._callback()


class Held:
    """A `Call` that answers `wait` when the gate is open, and everything else at once."""

    ended = False

    def __init__(self, gate: Gate, closed: asyncio.Event) -> None:
        self._gate = gate
        self._closed = closed

    def answers(self, data: bytes | None) -> Iterator[bytes | Awaited | None]:
        assert data is not None
        if data == b"wait":
            yield b"a word before"
            while not self._gate.open:
                yield self._gate
        yield data

    def close(self, *, lost: bool) -> None:
        self._closed.set()


@asynccontextmanager
async def calling() -> AsyncIterator[tuple[grpc.aio.StreamStreamCall, Gate, asyncio.Event, Http2Server]]:
    gate, closed = Gate(), asyncio.Event()

    def opened(_fields: Fields) -> Held:
        return Held(gate, closed)

    server = Http2Server({METHOD: opened}, 1 << 20)
    await server.start("127.0.0.1", 0)
    options = [("grpc.use_local_subchannel_pool", 1)]
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=options) as channel:
            async with asyncio.timeout(60):
                yield channel.stream_stream(METHOD)(), gate, closed, server
    finally:
        await server.stop(0)


async def test_messages_during_a_wait_are_answered_after_it_in_order() -> None:
    async with calling() as (call, gate, _, _):
        for message in (b"wait", b"second", b"third"):
            await call.write(message)
        assert await call.read() == b"a word before"
        await gate.asked.acquire()
        gate.let_go()
        assert [await call.read() for _ in range(3)] == [b"wait", b"second", b"third"]
        await call.done_writing()
        assert await call.code() == grpc.StatusCode.OK


async def test_a_call_woken_too_early_keeps_waiting() -> None:
    async with calling() as (call, gate, _, server):
        await call.write(b"wait")
        assert await call.read() == b"a word before"
        await gate.asked.acquire()
        (peer,) = server.peers
        for _ in range(3):
            peer.resume_writing()
            await gate.asked.acquire()
        gate.let_go()
        assert await call.read() == b"wait"
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


async def test_a_leaving_client_closes_the_call_and_later_results_are_dropped() -> None:
    async with calling() as (call, gate, closed, server):
        await call.write(b"wait")
        await gate.asked.acquire()
        call.cancel()
        await closed.wait()
        gate.let_go()
        assert len(server.peers) == 1
