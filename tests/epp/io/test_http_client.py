"""Connections to engines: one is kept for each, a closed one is replaced silently, keys go only to their engines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from support.ports import free_base
from treeline_epp.endpoints import http_client
from treeline_epp.endpoints.http_answer import HttpError, HttpTimeout, NotHttp
from treeline_epp.endpoints.http_client import HttpClient

HELLO = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"


@dataclass
class Server:
    """A server that answers the n-th request on its m-th connection with `says(m, n)`; None cuts the connection."""

    says: Callable[[int, int], bytes | None] = lambda _connection, _request: HELLO
    heads: list[bytes] = field(default_factory=list)
    connections: int = 0
    open: int = 0
    address: str = ""
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        mine, asked = self.connections, 0
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                self.heads.append(await reader.readuntil(b"\r\n\r\n"))
                asked += 1
                if (answer := self.says(mine, asked)) is None:
                    break
                writer.write(answer)
                await writer.drain()
        writer.close()
        self.open -= 1
        self.ended.set()


@contextlib.asynccontextmanager
async def serving(server: Server, host: str = "127.0.0.1") -> AsyncIterator[HttpClient]:
    listening = await asyncio.start_server(server.serve, host, 0)
    port = listening.sockets[0].getsockname()[1]
    server.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    client = HttpClient()
    try:
        yield client
    finally:
        await client.close()
        listening.close()


def ask(client: HttpClient, server: Server, within_s: float = 60.0) -> Awaitable[tuple[int, bytes]]:
    async def answered() -> tuple[int, bytes]:
        answer = await client.get(server.address, "/health", within_s=within_s, most=100)
        return answer.status, answer.body

    return answered()


async def test_one_connection_serves_one_request_after_another() -> None:
    server = Server()
    async with serving(server) as client:
        for _ in range(20):
            assert await ask(client, server) == (200, b"hi")
    assert (server.connections, len(server.heads)) == (1, 20)


async def test_unused_connections_are_closed() -> None:
    gone, asked, stays = Server(), Server(), Server()
    async with serving(stays) as client, serving(gone), serving(asked):
        for server in (gone, asked, stays, asked):
            await ask(client, server)
        assert list(client._kept) == [gone.address, stays.address, asked.address]
        client._kept[gone.address].used_at -= http_client.IDLE_S + 1
        await ask(client, stays)
        assert list(client._kept) == [asked.address, stays.address]
        async with asyncio.timeout(60):
            await gone.ended.wait()
        assert (asked.connections, stays.connections) == (1, 1)


async def test_requests_at_the_same_time_have_their_own_and_one_is_kept() -> None:
    server = Server()
    async with serving(server) as client:
        await asyncio.gather(*(ask(client, server) for _ in range(5)))
        await ask(client, server)
        assert server.connections == 5


async def test_a_closed_kept_connection_is_replaced_silently() -> None:
    server = Server(says=lambda _connection, asked: HELLO if asked == 1 else None)  # cut at the second request
    async with serving(server) as client:
        for _ in range(3):
            assert await ask(client, server) == (200, b"hi")
    assert server.connections == 3
    assert len(server.heads) == 5, "each was asked twice but the first"


async def test_a_new_connection_closed_without_an_answer_is_an_error() -> None:
    server = Server(says=lambda _connection, _asked: None)
    async with serving(server) as client:
        with pytest.raises(NotHttp):
            await ask(client, server)
    assert len(server.heads) == 1, "and the request is not made again"


async def test_an_answer_that_breaks_off_is_an_error_on_a_kept_connection_too() -> None:
    server = Server(
        says=lambda _connection, asked: HELLO if asked == 1 else b"HTTP/1.1 200 OK\r\nconnection: cl\r\n\r\n"
    )
    async with serving(server) as client:
        await ask(client, server)
        with pytest.raises(HttpTimeout):
            await ask(client, server, 0.05)  # a body until the end, which does not come
        assert await ask(client, server) == (200, b"hi")
    assert server.connections == 2


async def test_unrequested_data_ends_the_connection_and_is_no_answer() -> None:
    stale = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nold"
    server = Server(says=lambda connection, _asked: HELLO + stale if connection == 1 else HELLO)
    async with serving(server) as client:
        for _ in range(3):
            assert await ask(client, server) == (200, b"hi")
    assert server.connections == 2


async def test_a_redirect_is_an_answer_and_not_followed() -> None:
    other = Server()
    async with serving(other):
        moved = b"HTTP/1.1 302 Found\r\nlocation: http://%b/x\r\ncontent-length: 0\r\n\r\n" % other.address.encode()
        server = Server(says=lambda _connection, _asked: moved)
        async with serving(server) as client:
            assert await ask(client, server) == (302, b"")
    assert other.connections == 0


async def test_requests_send_their_host_and_the_current_key() -> None:
    server, keys = Server(), ["", "secret"]
    async with serving(server):
        client = HttpClient(lambda: keys.pop(0))
        await client.get(server.address, "/a b?c=d\r\nx: y", within_s=60, most=100, accept="text/plain")
        await client.get(server.address, "/v1/models", within_s=60, most=100)
        await client.close()
    first, second = (head.decode().split("\r\n") for head in server.heads)
    assert first[0] == "GET /a%20b?c=d%0D%0Ax:%20y HTTP/1.1"
    assert {f"host: {server.address}", "accept: text/plain", "accept-encoding: identity"} <= set(first)
    assert not any(line.startswith(("authorization", "x:")) for line in first)
    assert "authorization: Bearer secret" in second


async def test_ipv6_is_asked_too() -> None:
    server = Server()
    async with serving(server, "::1") as client:
        assert await ask(client, server) == (200, b"hi")


async def test_a_port_without_a_listener_is_a_connection_error() -> None:
    with pytest.raises(HttpError):
        await HttpClient().get(f"127.0.0.1:{free_base(1)}", "/", within_s=60, most=100)


async def test_a_cancelled_request_leaves_no_connection_behind() -> None:
    server = Server(says=lambda _connection, _asked: b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhi")
    async with serving(server) as client:
        with pytest.raises(HttpTimeout):
            await ask(client, server, 0.05)
        await asyncio.wait_for(server.ended.wait(), 60)
        assert server.open == 0


async def test_a_post_sends_its_pieces_and_says_when_it_is_on_its_way() -> None:
    server = Server()
    async with serving(server) as client:
        said: list[int] = []
        answer = await client.post(
            server.address,
            "/v1/completions",
            {"x-request-id": "r"},
            [b'{"a"', memoryview(b":1}\r\n\r\n")],
            within_s=60,
            most=100,
            sent=lambda: said.append(server.connections),
        )
        assert (answer.body, len(said)) == (b"hi", 1)
    head, body = server.heads
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /v1/completions HTTP/1.1"
    assert {b"x-request-id: r", b"content-type: application/json", b"content-length: 11"} <= set(lines)
    assert body == b'{"a":1}\r\n\r\n'


async def test_a_post_is_on_its_way_when_the_engine_takes_it_and_is_kept_no_longer_than_that() -> None:
    reads, said = asyncio.Event(), asyncio.Event()
    left: list[http_client.Buffer] = [bytes(60_000) for _ in range(400)]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reads.wait()
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(400 * 60_000)
        await said.wait()
        writer.write(HELLO)

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    client = HttpClient()
    post = asyncio.create_task(client.post(address, "/", {}, left, within_s=60, most=9, sent=said.set))
    await asyncio.wait([post], timeout=0.2)
    assert left, "the engine reads nothing"
    assert not said.is_set()
    reads.set()
    assert (await post).body == b"hi"
    assert not left
    await client.close()
    listening.close()


async def test_an_answer_before_the_request_was_read_ends_the_connection() -> None:
    answers = [b"HTTP/1.1 413 No\r\ncontent-length: 0\r\n\r\n", HELLO]
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answers.pop(0))
        with contextlib.suppress(OSError):
            await writer.drain()
            await ended.wait()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    client = HttpClient()
    body: list[http_client.Buffer] = [bytes(60_000) for _ in range(400)]
    assert (await client.post(address, "/", {}, body, within_s=60, most=9)).status == 413
    assert (await client.get(address, "/health", within_s=60, most=9)).body == b"hi"
    ended.set()
    await client.close()
    listening.close()


async def test_a_post_is_never_sent_twice() -> None:
    server = Server(says=lambda connection, _request: HELLO if connection == 1 else None)
    async with serving(server) as client:
        await ask(client, server)
        with pytest.raises(HttpError, match="without an answer"):
            await client.post(server.address, "/", {"tracestate": "\u2603"}, [b"\r\n\r\n"], within_s=60, most=9)
    assert server.connections == 2
    assert b"tracestate: ?" in server.heads[1]
