"""The driver with real clients: grpcio's, and sockets that send nothing or never read."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import ClassVar

import grpc
import pytest
from support.http2_frames import HELLO, data, headers
from treeline_epp.extproc import http2_server
from treeline_epp.extproc.http2_server import Http2Server
from treeline_epp.extproc.tls import Certificate
from treeline_epp.http2 import frames
from treeline_epp.http2.events import Limits
from treeline_epp.http2.fields import Fields

MOST = 4 << 20
METHOD = "/test.Echo/Process"
FIELDS = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", METHOD.encode()), (b":authority", b"x")]
GREETING = HELLO + frames.SETTINGS_ACK
BLOCK = frames.header_block([*FIELDS, (b"content-type", b"application/grpc"), (b"te", b"trailers")])


class Echo:
    """A `Call` that sends each message back; `turns` makes it yield to others, `end` is the last message."""

    open = 0
    lingers = False
    closed: asyncio.Event
    lost: ClassVar[list[bool]] = []

    def __init__(self, _fields: Fields) -> None:
        self.ended = False
        Echo.open += 1
        Echo.closed = asyncio.Event()

    def answers(self, data: bytes | None) -> Iterator[bytes | None]:
        if data is None:
            self.ended = True
            yield b"too large"
            return
        if data == b"turns":
            for _ in range(5):
                yield None
        if data == b"wrong":
            raise ValueError("not a message of mine")
        self.ended = data == b"end"
        yield data

    def close(self, *, lost: bool) -> None:
        Echo.open -= 1
        Echo.lost.append(lost)
        Echo.closed.set()


@asynccontextmanager
async def serving(
    tls: Certificate | None = None, held: int = 1 << 30, limits: Limits | None = None
) -> AsyncIterator[Http2Server]:
    Echo.lost.clear()
    server = Http2Server({METHOD: Echo}, MOST, limits, most_held_bytes=held)
    await server.start("127.0.0.1", 0, tls)
    try:
        yield server
    finally:
        await server.stop(0)
        assert Echo.open == 0, "every call is closed"
        assert server.held_bytes == 0


@asynccontextmanager
async def channel(server: Http2Server) -> AsyncIterator[grpc.aio.Channel]:
    options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=options) as made:
        yield made


def opened(stream: int) -> bytes:
    return headers(stream, BLOCK)


async def seen(reader: asyncio.StreamReader, last: bytes) -> bytes:
    """Read until `last` has come; return all bytes."""
    came = b""
    while last not in came:
        more = await asyncio.wait_for(reader.read(65536), 30)
        assert more, came[-300:]
        came += more
    return came


async def answered(client: grpc.aio.Channel, message: bytes = b"x") -> grpc.aio.StreamStreamCall:
    """Return a call whose first message has come back."""
    call = client.stream_stream(METHOD)()
    await call.write(message)
    assert await call.read() == message
    return call


async def until(holds: Callable[[], bool]) -> None:
    """Turn the loop until the condition holds; the test's time limit ends a wait that never would."""
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_messages_come_back_in_order_on_many_streams_at_once() -> None:
    async with serving() as server, channel(server) as client:

        async def one(seed: int) -> None:
            call = client.stream_stream(METHOD)()
            sent = [bytes([seed]) * size for size in (0, 1, 16_379, 16_380, 100_000, seed * 1000)] + [b"turns"]
            for message in sent:
                await call.write(message)
            await call.done_writing()
            assert [message async for message in call] == sent
            assert await call.code() == grpc.StatusCode.OK

        await asyncio.gather(*map(one, range(60)))


async def test_a_call_may_end_before_its_client_does() -> None:
    async with serving() as server, channel(server) as client:
        call = await answered(client, b"end")
        assert await call.read() is grpc.aio.EOF
        assert await call.code() == grpc.StatusCode.OK


async def test_an_unreadable_message_ends_the_call_and_not_the_connection() -> None:
    async with serving() as server, channel(server) as client:
        call = client.stream_stream(METHOD)()
        await call.write(b"wrong")
        assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
        other = client.stream_stream("/test.Echo/Nothing")()
        assert await other.code() == grpc.StatusCode.UNIMPLEMENTED
        (await answered(client)).cancel()
        assert len(server.peers) == 1


async def test_a_deadline_ends_the_call_here_too() -> None:
    async with serving() as server, channel(server) as client:
        call = client.stream_stream(METHOD)(timeout=0.2)
        await call.write(b"x")
        assert await call.read() == b"x"
        assert await call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await asyncio.wait_for(Echo.closed.wait(), 60)


async def test_a_draining_server_finishes_open_calls_and_takes_no_more() -> None:
    async with serving() as server, channel(server) as client:
        call = await answered(client)
        stopping = asyncio.create_task(server.stop(20))
        await asyncio.sleep(0)
        await call.write(b"after")
        assert await call.read() == b"after"
        await call.done_writing()
        assert await call.code() == grpc.StatusCode.OK
        await asyncio.wait_for(stopping, 60)
        assert not server.peers


@pytest.mark.parametrize("greets", [False, True])
async def test_a_silent_peer_is_disconnected(monkeypatch: pytest.MonkeyPatch, greets: bool) -> None:
    monkeypatch.setattr(http2_server, "KEEPALIVE_S", 0.05)
    async with serving() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        if greets:
            writer.write(GREETING)
        while True:  # it is pinged, and then its connection is reset
            try:
                if not await asyncio.wait_for(reader.read(1000), 60):
                    break
            except ConnectionResetError:
                break
        writer.close()
        assert not server.peers


async def test_a_peer_that_never_reads_takes_little_memory() -> None:
    async with serving() as server, channel(server) as client:
        sock = socket.create_connection(("127.0.0.1", server.port))
        sock.sendall(HELLO + opened(1))
        loop = asyncio.get_running_loop()
        sock.setblocking(False)
        frame = data(1, (b"\x00" + (8000).to_bytes(4, "big") + b"x" * 8000) * 2)
        for _ in range(60):  # less than its stream has room for
            await loop.sock_sendall(sock, frame)
        call = await answered(client)  # others are served

        def waiting() -> int:
            return max(peer._connection.waiting(1) for peer in server.peers)

        await until(lambda: waiting() > 100_000)  # what was sent is still being read
        assert waiting() < 400_000
        call.cancel()
        sock.close()


async def test_many_messages_in_one_read_let_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2_server, "_TURN_S", 0.0)  # one event, then the next waiting connection
    monkeypatch.setattr(http2_server, "_FRAMES", 10)
    async with serving() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        messages = {stream: b"\x00\x00\x00\x00\x04" + stream.to_bytes(4, "big") for stream in range(1, 201, 2)}
        asked = (opened(stream) + data(stream, message, end=True) for stream, message in messages.items())
        writer.write(GREETING + b"".join(asked))
        came, turns = b"", 0
        while not all(message in came for message in messages.values()):
            came += await asyncio.wait_for(reader.read(65536), 60)
            turns += 1
        assert turns > 1, "what was answered is written before the rest is dealt with"
        writer.close()
        await until(lambda: not server.peers)


@pytest.mark.parametrize("asks", [b"", b"\x00\x00\x00\x00\x01x"], ids=["at once", "after a message"])
async def test_calls_that_one_client_aborts_at_once_do_not_end_the_connection_of_all(asks: bytes) -> None:
    async with serving(limits=Limits(idle_frames=10)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(GREETING + opened(1))
        for stream in range(3, 2003, 2):
            writer.write(opened(stream) + (data(stream, asks) if asks else b"") + frames.rst_stream(stream, 8))
        writer.write(frames.ping(b"are done", ack=False))
        await seen(reader, b"are done")
        await until(lambda: len(Echo.lost) == 1000)
        assert Echo.open == 1, "the first one is still served"
        assert not any(Echo.lost)
        writer.close()
        await until(lambda: not server.peers)
        assert Echo.lost[-1], "with its connection"


async def test_a_message_that_is_too_large_is_the_last_of_its_call() -> None:
    async with serving() as server, channel(server) as client:
        call = await answered(client)
        await call.write(b"x" * (MOST + 1))
        assert await call.read() == b"too large"
        assert await call.code() == grpc.StatusCode.OK
        assert server.held_bytes == 0
        (await answered(client)).cancel()  # the connection goes on


async def test_a_peer_that_reads_nothing_is_no_longer_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call to an unknown method is answered at once, whatever the peer's windows are."""
    monkeypatch.setattr(http2_server, "_UNREAD_BYTES", 100_000)
    async with serving() as server:
        sock = socket.create_connection(("127.0.0.1", server.port))
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        block = frames.header_block(
            [*FIELDS[:2], (b":path", b"/" + b"x" * 180), (b"content-type", b"application/grpc")]
        )
        sent = HELLO + b"".join(headers(stream, block) for stream in range(1, 200_001, 2))
        writing = asyncio.create_task(asyncio.get_running_loop().sock_sendall(sock, sent))
        await until(lambda: any(not peer._reading for peer in server.peers))
        (peer,) = server.peers
        assert not writing.done()
        for _ in range(100):
            await asyncio.sleep(0)
            assert peer._transport is not None
            assert peer._transport.get_write_buffer_size() < 1_000_000
        writing.cancel()
        sock.close()
        await until(lambda: not server.peers)


HPACK = {
    "a thousand fields by reference": (b"\x20" + b"\x84" * 16_000, False),
    "a field of many bytes": (b"\x20" + BLOCK + b"\x00\x01x\x7f\x81\x7e" + b"v" * 16_256, False),
    "bytes of no code": (b"\x20" + b"\x00\x01x\xff\x81\x1e" + b"\xff" * 3968, True),
    "an entry of no table": (b"\x20" + b"\xbe" * 9000, True),
    "names without end": (b"\x20" + b"\x00\x7f\xff\xff\xff\xff\x0f" + b"x" * 9000, True),
    "a table for ever smaller": (b"\x20" * 16_000, True),
    "a table of no number": (b"\x3f" + b"\xff" * 16_000, True),
    "a table larger than ours": (b"\x3f\xe1\x1f" + BLOCK, True),
}


@pytest.mark.parametrize("name", HPACK)
async def test_fields_that_are_bombs_cost_their_peer_more_than_us(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "treeline_epp")
    bomb, ends = HPACK[name]
    async with serving() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(GREETING + headers(1, b"\x20" + BLOCK))
        parts = [bomb[at : at + 16_384] for at in range(0, len(bomb), 16_384)]
        writer.write(headers(3, parts[0], 0))
        for part in parts[1:]:
            writer.write(frames.head(frames.CONTINUATION, 0, 3, len(part)) + part)
        writer.write(frames.head(frames.CONTINUATION, frames.END_HEADERS, 3, 0) + frames.ping(b"are done", ack=False))
        if ends:
            code = frames.Code.COMPRESSION_ERROR.to_bytes(4, "big")
            said = await reader.read()
            assert frames.head(frames.GOAWAY, 0, 0, 0)[3:] in said
            assert frames.NUMBER.pack(3) + code in said
        else:
            assert frames.rst_stream(3, frames.Code.ENHANCE_YOUR_CALM) in await seen(reader, b"are done")
            assert Echo.open == 1
        writer.close()
        await until(lambda: not server.peers)
        assert all(len(record.getMessage()) < 300 for record in caplog.records)


async def test_incomplete_messages_are_bounded_together() -> None:
    async with serving(held=100_000) as server, channel(server) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        part = b"\x00" + (20_000).to_bytes(4, "big") + b"x" * 10_000
        writer.write(GREETING + b"".join(opened(stream) + data(stream, part) for stream in range(1, 41, 2)))
        came = b""
        while came.count(b"too%20many") + came.count(b"too many") < 11:
            came += await asyncio.wait_for(reader.read(65536), 60)
        assert 90_000 < server.held_bytes <= 100_000
        writer.close()
        await until(lambda: len(server.peers) <= 1 and server.held_bytes == 0)
        (await answered(client)).cancel()


async def test_open_streams_are_bounded_over_all_connections_together() -> None:
    server = Http2Server({METHOD: Echo}, MOST, Limits(streams=8, all_streams=20))
    await server.start("127.0.0.1", 0)
    writers: list[asyncio.StreamWriter] = []

    async def connect() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        asked = b"".join(opened(1 + 2 * at) for at in range(8))
        writer.write(HELLO + asked + frames.ping(b"are done", ack=False))
        writers.append(writer)
        await seen(reader, b"are done")

    try:
        for _ in range(5):
            await connect()
        assert Echo.open == server.streams == 20, "forty were asked for"
        writers[0].close()
        await until(lambda: Echo.open == 12)
        assert server.streams == 12
        await connect()
        assert Echo.open == server.streams == 20, "a closed stream leaves room"
    finally:
        for writer in writers:
            writer.close()
        await server.stop(0)
    assert Echo.open == server.streams == 0
