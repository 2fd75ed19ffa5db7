"""Requests that arrive in part, methods besides GET and POST, and browsers: raw sockets against a real server."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import struct
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest
import uvicorn
from support.runtime_server import ServerProcess, running
from treeline_runtime.frontend import MAX_HEADER_BYTES, HttpProtocol

ORIGIN = "https://chat.example.org"


class Impatient(HttpProtocol):
    silent_s, headers_s, body_pause_s, body_s, stalled_s = 0.3, 0.3, 0.3, 1.0, 0.5


async def application(released: asyncio.Event, scope: dict[str, object], receive: object, send: object) -> None:
    """Reads the body and answers; `/big` with 32 MB, `/echo` with the body, `/held` with a half until `released`."""
    body = b""
    while True:
        message = await receive()  # type: ignore[operator]
        body += message.get("body", b"")
        if message["type"] == "http.disconnect":
            return
        if not message.get("more_body"):
            break
    if scope["path"] == "/held":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"10")]})  # type: ignore[operator]
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})  # type: ignore[operator]
        await released.wait()
        await send({"type": "http.response.body", "body": b"ended"})  # type: ignore[operator]
        return
    said = body if scope["path"] == "/echo" else b"ok"
    size = 32 << 20 if scope["path"] == "/big" else len(said)
    headers = [(b"content-length", b"%d" % size)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})  # type: ignore[operator]
    for _ in range(size // 65536):
        await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})  # type: ignore[operator]
    await send({"type": "http.response.body", "body": said[: size % 65536]})  # type: ignore[operator]


class Conversation:
    """One connection to a server with short time limits."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Conversation:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def until_closed(self) -> bytes:
        """Return everything read until the end or a reset, which a client gets that still writes."""
        said = b""
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionResetError):
                while part := await self.reader.read(65536):
                    said += part
        return said


class Served:
    """Runs uvicorn with our protocol during a block."""

    def __init__(self) -> None:
        self.released = asyncio.Event()
        """Lets answers of `/held` end."""

    async def __aenter__(self) -> int:
        serve = partial(application, self.released)
        config = uvicorn.Config(
            serve,  # type: ignore[arg-type]
            http=Impatient,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            timeout_keep_alive=3600,
        )
        self._server = uvicorn.Server(config)
        listener = socket.create_server(("127.0.0.1", 0))
        self._server.config.load()
        self._task = asyncio.create_task(self._server.serve([listener]))
        return int(listener.getsockname()[1])

    async def __aexit__(self, *_: object) -> None:
        self.released.set()
        self._server.should_exit = True
        await self._task


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", b""),
        (b"GE", b"HTTP/1.1 408 "),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx: ", b"HTTP/1.1 408 "),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 10\r\n\r\n", b"HTTP/1.1 408 "),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 10\r\n\r\nhalf", b"HTTP/1.1 408 "),
        (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n5\r\nabc", b"HTTP/1.1 408 "),
    ],
)
async def test_a_stalled_request_is_ended(sent: bytes, answer: bytes) -> None:
    async with Served() as port, Conversation(port) as talk:
        talk.writer.write(sent)
        said = await talk.until_closed()
    assert said.startswith(answer)
    assert bool(said) == bool(answer)


@pytest.mark.parametrize(
    "half",
    [b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 10\r\n\r\nhalf", b"GET / HTTP/1.1\r\nhost: a\r\nx: "],
)
async def test_a_stalled_request_does_not_interrupt_the_previous_answer(half: bytes) -> None:
    served = Served()
    async with served as port, Conversation(port) as talk:
        talk.writer.write(b"GET /held HTTP/1.1\r\nhost: a\r\n\r\n" + half)
        await talk.reader.readuntil(b"begun")
        async with Conversation(port) as later:  # when its time is over, that of the half request is over, too
            later.writer.write(b"GE")
            assert (await later.until_closed()).startswith(b"HTTP/1.1 408 ")
        served.released.set()
        said = await talk.until_closed()
    assert said.startswith(b"ended")
    assert said.removeprefix(b"ended").startswith(b"HTTP/1.1 408 ")


async def test_a_request_that_trickles_is_ended() -> None:
    async with Served() as port, Conversation(port) as talk:
        talk.writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n")
        started = time.monotonic()
        ended = asyncio.create_task(talk.until_closed())
        while not ended.done() and time.monotonic() - started < 60:
            talk.writer.write(b"x")
            await asyncio.wait({ended}, timeout=0.1)
        assert (await ended).startswith(b"HTTP/1.1 408 ")
        assert time.monotonic() - started >= 1.0


async def test_a_connection_that_the_client_resets_leaves_nothing() -> None:
    """It would wait in memory until it might have been idle for long enough."""
    async with Served() as port:
        async with Conversation(port) as talk:
            talk.writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            await talk.reader.readuntil(b"ok")
            sock = talk.writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            talk.writer.transport.abort()  # type: ignore[attr-defined]
        async with asyncio.timeout(60):
            while any(type(each) is Impatient for each in gc.get_objects()):
                gc.collect()
                await asyncio.sleep(0.01)


async def test_a_request_in_parts_is_answered_and_the_connection_kept() -> None:
    async with Served() as port, Conversation(port) as talk:
        for _ in range(2):
            for part in (b"POST / HTTP/1.1\r\nhost", b": a\r\ncontent-length: 4\r\n\r\n", b"ab", b"cd"):
                talk.writer.write(part)
                await asyncio.sleep(0.1)
            async with asyncio.timeout(60):
                assert (await talk.reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 ")
            await asyncio.sleep(0.5)  # longer than any part may take: between requests there is time


async def test_endless_headers_are_refused() -> None:
    async with Served() as port, Conversation(port) as talk:
        talk.writer.write(b"GET / HTTP/1.1\r\n")
        line = b"x-more: " + b"y" * 1000 + b"\r\n"
        talk.writer.write(line * (2 * MAX_HEADER_BYTES // len(line)))
        assert (await talk.until_closed()).startswith(b"HTTP/1.1 431 ")


async def test_a_client_that_reads_nothing_is_disconnected() -> None:
    async with Served() as port, Conversation(port) as talk:
        talk.writer.transport.pause_reading()  # type: ignore[attr-defined]
        talk.writer.write(b"GET /big HTTP/1.1\r\nhost: a\r\n\r\n")
        await asyncio.sleep(1.5)
        talk.writer.transport.resume_reading()  # type: ignore[attr-defined]
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            async with asyncio.timeout(60):
                await talk.reader.readexactly(32 << 20)


UPGRADES = {
    "h2c": b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n",
    "websocket": b"connection: keep-alive, Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n",
}


@pytest.mark.parametrize("offer", UPGRADES)
@pytest.mark.parametrize(
    ("framing", "body"),
    [(b"content-length: 4", b"abcd"), (b"transfer-encoding: chunked", b"4\r\nabcd\r\n0\r\n\r\n")],
)
@pytest.mark.parametrize("apart", [False, True])
async def test_a_requested_upgrade_is_ignored_and_the_body_kept(
    offer: str, framing: bytes, body: bytes, apart: bool
) -> None:
    head = b"POST /echo HTTP/1.1\r\nhost: a\r\n" + UPGRADES[offer] + framing + b"\r\n\r\n"
    async with Served() as port, Conversation(port) as talk:
        if apart:
            for part in (head[:60], head[60:], body[:3], body[3:]):
                talk.writer.write(part)
                await asyncio.sleep(0.05)
        else:
            talk.writer.write((head + body) * 3)  # the next requests are not lost either
        async with asyncio.timeout(60):
            for _ in range(1 if apart else 3):
                answer = await talk.reader.readuntil(b"abcd")
                assert answer.startswith(b"HTTP/1.1 200 ")
            talk.writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            assert (await talk.reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 ")


async def test_a_body_after_a_requested_upgrade_must_arrive_in_time() -> None:
    async with Served() as port, Conversation(port) as talk:
        talk.writer.write(b"POST / HTTP/1.1\r\n" + UPGRADES["h2c"] + b"content-length: 4\r\n\r\nab")
        assert (await talk.until_closed()).startswith(b"HTTP/1.1 408 ")


async def test_a_tunnel_is_refused() -> None:
    async with Served() as port, Conversation(port) as talk:
        talk.writer.write(b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\nxx")
        assert (await talk.until_closed()).startswith(b"HTTP/1.1 400 ")


# ---- methods and browsers -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def open_to_pages(model: Path) -> Iterator[ServerProcess]:
    with running(model, "--no-events", "--cors-allow-origin", ORIGIN, fake=True) as server:
        yield server


def test_head_is_get_without_a_body(http: httpx.Client) -> None:
    for path in ("/live", "/health", "/v1/models", "/server_info"):
        got, head = http.get(path), http.head(path)
        assert (head.status_code, head.content) == (got.status_code, b"")
        assert head.headers["content-type"] == got.headers["content-type"]
    assert http.head("/v1/completions").status_code == 405
    assert http.head("/nowhere").status_code == 404


def test_a_wrong_method_is_405_and_the_answer_names_the_right_one(http: httpx.Client) -> None:
    for method, path, has in (
        ("GET", "/v1/completions", "POST"),
        ("DELETE", "/v1/models/some", "GET"),
        ("OPTIONS", "/v1/models", "GET"),
    ):
        answer = http.request(method, path, headers={"origin": ORIGIN})
        assert (answer.status_code, answer.headers["allow"]) == (405, has)
        assert answer.json()["error"]["code"] == "method_not_allowed"
        assert "access-control-allow-origin" not in answer.headers


def test_pages_of_an_allowed_origin_may_call(open_to_pages: ServerProcess) -> None:
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-a"}
    with open_to_pages.client() as http:
        preflight = http.options("/v1/completions", headers={"origin": ORIGIN, **asks})
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == ORIGIN
        assert preflight.headers["access-control-allow-headers"] == "authorization,x-a"
        assert "POST" in preflight.headers["access-control-allow-methods"]
        answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"origin": ORIGIN})
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert "Origin" in answer.headers["vary"]
        assert "access-control-allow-credentials" not in answer.headers
        refused = http.post("/v1/completions", json={"prompt": 1}, headers={"origin": ORIGIN})
        assert refused.status_code == 400
        assert refused.headers["access-control-allow-origin"] == ORIGIN


def test_pages_of_other_origins_may_not(open_to_pages: ServerProcess) -> None:
    asks = {"access-control-request-method": "POST"}
    with open_to_pages.client() as http:
        for origin in ("https://evil.example.org", ORIGIN + ".evil.org", "null", "http://chat.example.org"):
            for answer in (
                http.options("/v1/completions", headers={"origin": origin, **asks}),
                http.get("/v1/models", headers={"origin": origin}),
            ):
                assert "access-control-allow-origin" not in answer.headers
