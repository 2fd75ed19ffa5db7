"""Connections to a server: bounded in number, each returned once, none shared with a forked process."""

from __future__ import annotations

import asyncio
import json
import os
import resource
from collections.abc import Iterator
from typing import Any

import pytest
from support.fake_openai import FakeOpenAI, serving, whole_answer
from support.lang_backend import PATIENCE_S
from treeline_lang import RuntimeEndpoint, function, gen
from treeline_lang.backends import connections as connections_module
from treeline_lang.backends.connections import BrokeOff, Connections
from treeline_lang.backends.http import HttpClient

SAID = {"text": " fine", "meta_info": {"finish_reason": {"type": "stop"}, "prompt_tokens": 1}}


def answer(body: dict[str, Any]) -> Iterator[None] | bytes:
    return iter([None]) if body.get("break") else whole_answer(SAID)


def test_concurrent_requests_share_no_connection_and_later_ones_reuse_them() -> None:
    async def main(server: FakeOpenAI) -> None:
        client = HttpClient(server.url)
        for _ in range(3):
            answers = await asyncio.gather(*(client.post("/generate", {"n": i}) for i in range(20)))
            assert [answer["text"] for answer in answers] == [" fine"] * 20
        await client.close()
        await client.close()

    with serving(answer) as server:
        asyncio.run(main(server))
        assert server.connections <= 20


def test_a_low_limit_of_open_files_limits_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4, 4))  # half of it may be connections

    async def main(server: FakeOpenAI) -> None:
        connections = Connections(server.url, {}, PATIENCE_S)
        await asyncio.gather(*(ask(connections) for _ in range(40)))
        await connections.close()

    with serving(answer) as server:
        asyncio.run(main(server))
        assert server.connections <= 2


async def ask(connections: Connections, body: bytes = b"{}") -> bytes:
    async with connections.request("POST", "/generate", {}, body) as response:
        return b"".join([part async for part in response.parts()])


@pytest.mark.parametrize("how", ["broken", "left", "cancelled", "read"])
def test_a_connection_is_given_back_however_a_request_ends(how: str) -> None:
    async def main(server: FakeOpenAI) -> None:
        connections = Connections(server.url, {}, PATIENCE_S)
        connections._slots = asyncio.Semaphore(1)
        for _ in range(5):
            if how == "broken":
                with pytest.raises(BrokeOff):
                    await ask(connections, b'{"break": 1}')
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
        assert json.loads(await ask(connections)) == SAID
        assert not connections._slots.locked()
        await connections.close()

    with serving(answer) as server:
        asyncio.run(asyncio.wait_for(main(server), PATIENCE_S))
        assert how != "read" or server.connections == 1


def test_connections_that_are_idle_for_long_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections_module, "_KEPT_S", 0.05)

    async def main(server: FakeOpenAI) -> None:
        connections = Connections(server.url, {}, PATIENCE_S)
        for _ in range(2):  # they are opened again, and closed again
            await asyncio.gather(*(ask(connections) for _ in range(20)))
            for _ in iter(lambda: bool(connections.all), False):
                await asyncio.sleep(0.01)
            assert not connections.idle

    with serving(answer) as server:
        asyncio.run(asyncio.wait_for(main(server), PATIENCE_S))


def test_a_forked_process_does_not_write_to_its_parents_connections() -> None:
    @function
    def asks(s: Any) -> None:
        s += "x" + gen("a")

    with serving(answer) as server, RuntimeEndpoint(server.url) as backend:
        assert asks.run(backend=backend)["a"] == " fine"
        before = server.connections
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                status = 0 if asks.run(backend=backend)["a"] == " fine" else 2
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        assert asks.run(backend=backend)["a"] == " fine"
        assert server.connections - before >= 1, "the child had one of its own"


def test_a_server_behind_a_proxy_is_asked_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(answer) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        client = HttpClient("http://model.example")
        assert asyncio.run(client.post("/generate", {}))["text"] == " fine"
        monkeypatch.setenv("no_proxy", "model.example")
        assert Connections("http://model.example", {}, PATIENCE_S)._proxy is None
