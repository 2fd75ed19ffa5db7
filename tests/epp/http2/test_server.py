"""The driver with real clients: grpcio's, and sockets that say nothing or never read."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

import grpc
import pytest
from treeline_epp.extproc import http2_server
from treeline_epp.extproc.http2_server import Http2Server
from treeline_epp.extproc.tls import Certificate, self_signed
from treeline_epp.http2 import frames
from treeline_epp.http2.events import Limits
from treeline_epp.http2.fields import Fields

MOST = 4 << 20
METHOD = "/test.Echo/Process"
FIELDS = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", METHOD.encode()), (b":authority", b"x")]
BLOCK = frames.header_block([*FIELDS, (b"content-type", b"application/grpc"), (b"te", b"trailers")])


class Echo:
    """Implements `Call`: each message comes back; `turns` makes it give others a turn, `end` is the last one."""

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


def opened(stream: int, block: bytes = BLOCK) -> bytes:
    return frames.head(frames.HEADERS, frames.END_HEADERS, stream, len(block)) + block


async def seen(reader: asyncio.StreamReader, last: bytes) -> bytes:
    """What comes, until this."""
    came = b""
    while last not in came:
        more = await asyncio.wait_for(reader.read(65536), 30)
        assert more, came[-300:]
        came += more
    return came


async def until(holds: Callable[[], bool]) -> None:
    """Rounds of the loop until it does; the time limit of tests ends what never does."""
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


async def test_forty_megabytes_go_both_ways() -> None:
    async with serving() as server, channel(server) as client:
        call = client.stream_stream(METHOD)()
        message = bytes(range(256)) * (MOST // 512)
        for _ in range(20):
            await call.write(message)
            assert await call.read() == message
        await call.done_writing()
        assert await call.code() == grpc.StatusCode.OK


async def test_a_call_may_end_before_its_client_does() -> None:
    async with serving() as server, channel(server) as client:
        call = client.stream_stream(METHOD)()
        await call.write(b"end")
        assert await call.read() == b"end"
        assert await call.read() is grpc.aio.EOF
        assert await call.code() == grpc.StatusCode.OK


async def test_what_cannot_be_taken_ends_the_call_and_not_the_connection() -> None:
    async with serving() as server, channel(server) as client:
        call = client.stream_stream(METHOD)()
        await call.write(b"wrong")
        assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
        other = client.stream_stream("/test.Echo/Nothing")()
        assert await other.code() == grpc.StatusCode.UNIMPLEMENTED
        again = client.stream_stream(METHOD)()
        await again.write(b"x")
        assert await again.read() == b"x"
        again.cancel()
        assert len(server.peers) == 1


async def test_a_deadline_ends_the_call_here_too() -> None:
    async with serving() as server, channel(server) as client:
        call = client.stream_stream(METHOD)(timeout=0.2)
        await call.write(b"x")
        assert await call.read() == b"x"
        assert await call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await asyncio.wait_for(Echo.closed.wait(), 60)


async def test_who_drains_finishes_open_calls_and_takes_no_more() -> None:
    async with serving() as server, channel(server) as client:
        call = client.stream_stream(METHOD)()
        await call.write(b"before")
        assert await call.read() == b"before"
        stopping = asyncio.create_task(server.stop(20))
        await asyncio.sleep(0)
        await call.write(b"after")
        assert await call.read() == b"after"
        await call.done_writing()
        assert await call.code() == grpc.StatusCode.OK
        await asyncio.wait_for(stopping, 60)
        assert not server.peers


async def test_a_new_certificate_is_for_those_who_come_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2_server, "_CERTIFICATE_S", 0.01)

    def write() -> bytes:
        key, chain = self_signed()
        (tmp_path / "tls.key").write_bytes(key)
        (tmp_path / "tls.crt").write_bytes(chain)
        return chain

    async def asks(chain: bytes) -> grpc.aio.Channel:
        options = [("grpc.ssl_target_name_override", "localhost"), ("grpc.use_local_subchannel_pool", 1)]
        made = grpc.aio.secure_channel(f"127.0.0.1:{server.port}", grpc.ssl_channel_credentials(chain), options=options)
        call = made.stream_stream(METHOD)()
        await call.write(b"x")
        assert await call.read() == b"x"
        return made

    first = write()
    async with serving(Certificate(tmp_path)) as server:
        before = await asks(first)
        (tmp_path / "tls.crt").write_text("half a file")
        await asyncio.sleep(0.1)
        await (await asks(first)).close()
        second = write()
        for _ in range(3000):
            await asyncio.sleep(0.02)
            try:
                after = await asks(second)
                break
            except grpc.aio.AioRpcError:
                continue
        call = before.stream_stream(METHOD)()
        await call.write(b"y")
        assert await call.read() == b"y", "who was there goes on"
        await before.close()
        await after.close()


@pytest.mark.parametrize("greets", [False, True])
async def test_a_peer_that_says_nothing_is_gone(monkeypatch: pytest.MonkeyPatch, greets: bool) -> None:
    monkeypatch.setattr(http2_server, "KEEPALIVE_S", 0.05)
    async with serving() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        if greets:
            writer.write(frames.PREFACE + frames.settings({}) + frames.SETTINGS_ACK)
        while True:  # it is pinged, and then its connection is reset
            try:
                if not await asyncio.wait_for(reader.read(1000), 60):
                    break
            except ConnectionResetError:
                break
        writer.close()
        assert not server.peers


async def test_a_peer_that_never_reads_makes_us_keep_no_more_than_a_little() -> None:
    async with serving() as server, channel(server) as client:
        sock = socket.create_connection(("127.0.0.1", server.port))
        sock.sendall(frames.PREFACE + frames.settings({}))
        sock.sendall(frames.head(frames.HEADERS, frames.END_HEADERS, 1, len(BLOCK)) + BLOCK)
        loop = asyncio.get_running_loop()
        sock.setblocking(False)
        body = (b"\x00" + (8000).to_bytes(4, "big") + b"x" * 8000) * 2
        frame = frames.head(frames.DATA, 0, 1, len(body)) + body
        for _ in range(60):  # less than its stream has room for
            await loop.sock_sendall(sock, frame)
        call = client.stream_stream(METHOD)()
        await call.write(b"x")
        assert await call.read() == b"x", "others are served"

        def waiting() -> int:
            return max(peer._connection.waiting(1) for peer in server.peers)

        await until(lambda: waiting() > 100_000)  # what was sent is still being read
        assert waiting() < 400_000
        call.cancel()
        sock.close()


async def test_many_messages_of_one_read_leave_others_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2_server, "_TURN_S", 0.0)  # one event, and the next who waits
    monkeypatch.setattr(http2_server, "_FRAMES", 10)
    async with serving() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        sent = frames.PREFACE + frames.settings({}) + frames.SETTINGS_ACK
        for stream in range(1, 201, 2):
            sent += frames.head(frames.HEADERS, frames.END_HEADERS, stream, len(BLOCK)) + BLOCK
            message = b"\x00\x00\x00\x00\x04" + stream.to_bytes(4, "big")
            sent += frames.head(frames.DATA, frames.END_STREAM, stream, len(message)) + message
        writer.write(sent)
        seen, turns = b"", 0
        while not all(b"\x00\x00\x00\x00\x04" + stream.to_bytes(4, "big") in seen for stream in range(1, 201, 2)):
            seen += await asyncio.wait_for(reader.read(65536), 60)
            turns += 1
        assert turns > 1, "what was answered is written before the rest is dealt with"
        writer.close()
        await until(lambda: not server.peers)


@pytest.mark.parametrize("asks", [b"", b"\x00\x00\x00\x00\x01x"], ids=["at once", "after a message"])
async def test_calls_that_one_client_aborts_at_once_do_not_end_the_connection_of_all(asks: bytes) -> None:
    async with serving(limits=Limits(idle_frames=10)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(frames.PREFACE + frames.settings({}) + frames.SETTINGS_ACK + opened(1))
        for stream in range(3, 2003, 2):
            message = frames.head(frames.DATA, 0, stream, len(asks)) + asks if asks else b""
            writer.write(opened(stream) + message + frames.rst_stream(stream, 8))
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
        call = client.stream_stream(METHOD)()
        await call.write(b"x")
        assert await call.read() == b"x"
        await call.write(b"x" * (MOST + 1))
        assert await call.read() == b"too large"
        assert await call.code() == grpc.StatusCode.OK
        assert server.held_bytes == 0
        watch = client.stream_stream(METHOD)()
        await watch.write(b"x")
        assert await watch.read() == b"x", "the connection goes on"
        watch.cancel()


async def test_a_peer_that_reads_nothing_is_read_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call that nobody serves is answered at once, whatever the peer's windows."""
    monkeypatch.setattr(http2_server, "_UNREAD_BYTES", 100_000)
    async with serving() as server:
        sock = socket.create_connection(("127.0.0.1", server.port))
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        block = frames.header_block(
            [*FIELDS[:2], (b":path", b"/" + b"x" * 180), (b"content-type", b"application/grpc")]
        )
        sent = frames.PREFACE + frames.settings({}) + b"".join(opened(stream, block) for stream in range(1, 200_001, 2))
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
        writer.write(frames.PREFACE + frames.settings({}) + frames.SETTINGS_ACK + opened(1, b"\x20" + BLOCK))
        parts = [bomb[at : at + 16_384] for at in range(0, len(bomb), 16_384)]
        writer.write(frames.head(frames.HEADERS, 0, 3, len(parts[0])) + parts[0])
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


async def test_messages_that_are_never_whole_are_bounded_together() -> None:
    async with serving(held=100_000) as server, channel(server) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(frames.PREFACE + frames.settings({}) + frames.SETTINGS_ACK)
        part = b"\x00" + (20_000).to_bytes(4, "big") + b"x" * 10_000
        for stream in range(1, 41, 2):
            writer.write(frames.head(frames.HEADERS, frames.END_HEADERS, stream, len(BLOCK)) + BLOCK)
            writer.write(frames.head(frames.DATA, 0, stream, len(part)) + part)
        seen = b""
        while seen.count(b"too%20many") + seen.count(b"too many") < 11:
            seen += await asyncio.wait_for(reader.read(65536), 60)
        assert 90_000 < server.held_bytes <= 100_000
        writer.close()
        await until(lambda: len(server.peers) <= 1 and server.held_bytes == 0)
        call = client.stream_stream(METHOD)()
        await call.write(b"x")
        assert await call.read() == b"x"
        call.cancel()


async def test_open_streams_are_bounded_over_all_connections_together() -> None:
    server = Http2Server({METHOD: Echo}, MOST, Limits(streams=8, all_streams=20))
    await server.start("127.0.0.1", 0)
    writers: list[asyncio.StreamWriter] = []

    async def connect() -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        opened = b"".join(
            frames.head(frames.HEADERS, frames.END_HEADERS, 1 + 2 * at, len(BLOCK)) + BLOCK for at in range(8)
        )
        writer.write(frames.PREFACE + frames.settings({}) + opened + frames.ping(b"are done", ack=False))
        writers.append(writer)
        seen = b""
        while b"are done" not in seen:
            seen += await asyncio.wait_for(reader.read(65536), 60)
        return reader

    try:
        for _ in range(5):
            await connect()
        assert Echo.open == server.streams == 20, "forty were asked for"
        writers[0].close()
        await until(lambda: Echo.open == 12)
        assert server.streams == 12
        await connect()
        assert Echo.open == server.streams == 20, "whoever goes leaves room"
    finally:
        for writer in writers:
            writer.close()
        await server.stop(0)
    assert Echo.open == server.streams == 0
