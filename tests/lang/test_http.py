"""HTTP/1.1 as servers use it: ends of bodies, interim answers, TLS, proxies."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.lang_backend import PATIENCE_S
from treeline_epp.extproc.tls import self_signed
from treeline_lang import Unreachable
from treeline_lang.backends.connections import BrokeOff, CannotConnect, Connections
from treeline_lang.backends.http import HttpClient

TEXT = b"hello world"
FINE = b"HTTP/1.1 200 OK\r\ncontent-length: 11\r\n\r\n" + TEXT


@asynccontextmanager
async def serving(handle: Callable[..., Awaitable[None]], **options: Any) -> AsyncGenerator[int]:
    """Run a server for connections; yields its port."""

    async def whole(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handle(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(whole, "127.0.0.1", 0, **options) as server:
        yield server.sockets[0].getsockname()[1]


def answers(*answer: bytes) -> Callable[..., Awaitable[None]]:
    """Return a handler that sends the pieces one by one to the first request of a connection, and closes it."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in answer:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)

    return handle


async def ask(url: str) -> tuple[int, bytes]:
    connections = Connections(url, {"x-key": "k"}, PATIENCE_S)
    try:
        async with connections.request("GET", "/x", {}, b"") as response:
            return response.status, b"".join([part async for part in response.parts()])
    finally:
        await connections.close()


def packed(name: str, body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-encoding: %s\r\ncontent-length: %d\r\n\r\n%s" % (name.encode(), len(body), body)


@pytest.mark.parametrize(
    "answer",
    [
        (FINE,),
        tuple(FINE[at : at + 1] for at in range(len(FINE))),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
            b"6\r\nhello \r\n5;x=y\r\nworld\r\n0\r\nt: 1\r\n\r\n",
        ),
        (b"HTTP/1.1 200 OK\r\n\r\nhello", b" world"),
        (b"HTTP/1.0 200 OK\r\n\r\nhello world",),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n", FINE),
    ],
)
async def test_an_answer_is_read_with_every_kind_of_end(answer: tuple[bytes, ...]) -> None:
    async with serving(answers(*answer)) as port:
        assert await ask(f"http://127.0.0.1:{port}") == (200, TEXT)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((FINE[:-1],), "closed"),
        ((b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n",), "closed"),
        ((b"HTTP/1.1 200 OK\r\nx: ", *[b"y" * 65536] * 100), "no end"),
        ((b"HTTP/1.1 100 Continue\r\n\r\n" * 4096,) * 100, "no end"),
        ((packed("gzip", TEXT),), "packed as 'gzip'"),
        ((b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nxx",), "not HTTP"),
    ],
)
async def test_an_incomplete_answer_is_an_error(answer: tuple[bytes, ...], reason: str) -> None:
    async with serving(answers(*answer)) as port:
        with pytest.raises(BrokeOff, match=reason):
            await ask(f"http://127.0.0.1:{port}")


async def test_a_server_waits_for_a_client_that_does_not_read() -> None:
    sent = 0

    async def floods(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (64 << 20))
        for _ in range(1024):
            writer.write(bytes(65536))
            await writer.drain()
            sent += 65536

    async with serving(floods) as port:
        connections = Connections(f"http://127.0.0.1:{port}", {}, PATIENCE_S)
        async with connections.request("GET", "/", {}, b"") as response:
            before = -1
            while before != sent:  # as long as it still sends
                before = sent
                for _ in range(2000):
                    await asyncio.sleep(0)
            assert sent < 32 << 20
            assert sum([len(part) async for part in response.parts()]) == 64 << 20
        await connections.close()


def terms(folder: Path) -> ssl.SSLContext:
    """Return the TLS context of a server named localhost; its certificate is in the folder."""
    for name, data in zip(("key", "certificate"), self_signed(), strict=True):
        (folder / name).write_bytes(data)
    made = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    made.load_cert_chain(folder / "certificate", folder / "key")
    return made


@pytest.mark.parametrize("refuses", [False, True])
async def test_a_server_with_tls_is_reached_through_a_proxy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refuses: bool
) -> None:
    asked: list[bytes] = []
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certificate"))

    async def proxies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        if refuses:
            writer.write(b"HTTP/1.1 407 No\r\ncontent-length: 0\r\n\r\n")
            return
        there = await asyncio.open_connection("127.0.0.1", int(asked[0].split()[1].rpartition(b":")[2]))
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                sink.write(data)
            sink.close()

        await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))

    async with serving(answers(FINE), ssl=terms(tmp_path)) as port, serving(proxies) as proxy:
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        assert await ask(f"https://localhost:{port}") == (200, TEXT)
        monkeypatch.setenv("https_proxy", f"http://me:pa%20ss@127.0.0.1:{proxy}")
        if refuses:
            with pytest.raises(CannotConnect, match="proxy answered 407"):
                await ask(f"https://localhost:{port}")
        else:
            assert await ask(f"https://localhost:{port}") == (200, TEXT)
        assert asked[0].startswith(b"CONNECT localhost:%d HTTP/1.1\r\n" % port)
        assert b"proxy-authorization: Basic bWU6cGEgc3M=" in asked[0]
        assert b"x-key" not in asked[0]


async def test_a_server_whose_certificate_is_not_trusted_cannot_be_reached(tmp_path: Path) -> None:
    async with serving(answers(FINE), ssl=terms(tmp_path)) as port:
        with pytest.raises(CannotConnect, match="certificate"):
            await ask(f"https://localhost:{port}")


@pytest.mark.parametrize(
    ("replies", "seen"),
    [((b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", b""), 5), ((b"",), 1)],
    ids=["closed while it was idle", "never answered"],
)
async def test_a_request_is_resent_only_if_its_idle_connection_was_closed(
    replies: tuple[bytes, ...], seen: int
) -> None:
    """The second and the third request find their connection closed."""
    requests: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for reply in replies:
            requests.append(await reader.readuntil(b"\r\n\r\n{}"))
            writer.write(reply)
            await writer.drain()

    async with serving(handle) as port:
        client = HttpClient(f"http://127.0.0.1:{port}")
        if seen == 1:
            with pytest.raises(Unreachable):
                await client.post("/x", {})
        else:
            assert [await client.post("/x", {}) for _ in range(3)] == [{}, {}, {}]
        await client.close()
    assert len(requests) == seen
