"""Connections to a server: as many as there may be, each given back once, none shared with a forked process."""

from __future__ import annotations

import asyncio
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from support.lang_backend import PATIENCE_S
from treeline_lang import RuntimeEndpoint, function, gen
from treeline_lang.backends import connections as connections_module
from treeline_lang.backends.connections import BrokeOff, Connections
from treeline_lang.backends.http import HttpClient

ANSWER = b'{"text": " fine", "meta_info": {"finish_reason": {"type": "stop"}, "prompt_tokens": 1}}'


class Counting(ThreadingHTTPServer):
    """Knows how many connections there were, and the most that were answered at a time."""

    request_queue_size = 256
    daemon_threads = True

    def __init__(self) -> None:
        self.connections, self.now, self.most = set[Any](), 0, 0
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), Answering)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answering(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Counting

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        with self.server.lock:
            self.server.connections.add(self.client_address)
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
        if self.path == "/break":
            self.close_connection = True
        else:
            self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(ANSWER) + ANSWER)
        with self.server.lock:
            self.server.now -= 1

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def counting() -> Iterator[Counting]:
    server = Counting()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join(PATIENCE_S)
        server.server_close()


def test_requests_share_no_connection_at_a_time_and_use_them_again() -> None:
    async def main(server: Counting) -> None:
        client = HttpClient(server.url)
        for _ in range(3):
            answers = await asyncio.gather(*(client.post("/generate", {"n": i}) for i in range(20)))
            assert [answer["text"] for answer in answers] == [" fine"] * 20
        await client.close()
        await client.close()

    with counting() as server:
        asyncio.run(main(server))
        assert len(server.connections) <= 20


def test_a_process_that_may_have_few_files_has_few_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4, 4))  # half of it may be connections

    async def main(server: Counting) -> None:
        connections = Connections(server.url, {}, PATIENCE_S)
        await asyncio.gather(*(ask(connections) for _ in range(40)))
        await connections.close()

    with counting() as server:
        asyncio.run(main(server))
        assert server.most <= 2
        assert len(server.connections) <= 2


async def ask(connections: Connections, path: str = "/generate") -> bytes:
    async with connections.request("POST", path, {}, b"{}") as response:
        return b"".join([part async for part in response.parts()])


@pytest.mark.parametrize("how", ["broken", "left", "cancelled", "read"])
def test_a_connection_is_given_back_however_a_request_ends(how: str) -> None:
    async def main(server: Counting) -> None:
        connections = Connections(server.url, {}, PATIENCE_S)
        connections._slots = asyncio.Semaphore(1)
        for _ in range(5):
            if how == "broken":
                with pytest.raises(BrokeOff):
                    await ask(connections, "/break")
            elif how == "left":
                async with connections.request("POST", "/generate", {}, b"{}"):
                    pass
            elif how == "cancelled":
                request = asyncio.ensure_future(ask(connections))
                await asyncio.sleep(0)
                request.cancel()
                await asyncio.wait([request])
            else:
                await ask(connections)
        assert await ask(connections) == ANSWER
        assert not connections._slots.locked()
        await connections.close()

    with counting() as server:
        asyncio.run(asyncio.wait_for(main(server), PATIENCE_S))
        assert how != "read" or len(server.connections) == 1


def test_connections_that_are_idle_for_long_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections_module, "_KEPT_S", 0.05)

    async def main(server: Counting) -> None:
        connections = Connections(server.url, {}, PATIENCE_S)
        for _ in range(2):  # they are opened again, and closed again
            await asyncio.gather(*(ask(connections) for _ in range(20)))
            for _ in iter(lambda: bool(connections.all), False):
                await asyncio.sleep(0.01)
            assert not connections.idle

    with counting() as server:
        asyncio.run(asyncio.wait_for(main(server), PATIENCE_S))


def test_a_forked_process_does_not_write_to_its_parents_connections() -> None:
    @function
    def asks(s: Any) -> None:
        s += "x" + gen("a")

    with counting() as server, RuntimeEndpoint(server.url) as backend:
        assert asks.run(backend=backend)["a"] == " fine"
        before = set(server.connections)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                status = 0 if asks.run(backend=backend)["a"] == " fine" else 2
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        assert asks.run(backend=backend)["a"] == " fine"
        assert len(server.connections - before) >= 1, "the child had one of its own"


def test_a_server_behind_a_proxy_is_asked_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with counting() as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        client = HttpClient("http://model.example")
        assert asyncio.run(client.post("/generate", {}))["text"] == " fine"
        monkeypatch.setenv("no_proxy", "model.example")
        assert Connections("http://model.example", {}, PATIENCE_S)._proxy is None
