"""The admin port's HTTP server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

import pytest
from support.http import client
from treeline_epp.admin import Admin, Page


def broken(_query: Mapping[str, str]) -> Page:
    raise RuntimeError("broken")


@pytest.fixture
async def port() -> AsyncIterator[int]:
    pages = {
        "/echo": lambda query: Page(dict(query)),
        "/text": lambda _query: Page(b"plain", content_type="text/plain"),
        "/ready": lambda _query: Page({"ready": False}, 503),
        "/broken": broken,
    }
    admin = Admin(pages)
    yield await admin.start("127.0.0.1", 0)
    await admin.stop()


async def test_pages_are_served(port: int) -> None:
    async with client(base_url=f"http://127.0.0.1:{port}") as http:
        assert (await http.get("/echo", params={"pod": "a b"})).json() == {"pod": "a b"}
        text = await http.get("/text")
        assert (text.text, text.headers["content-type"]) == ("plain", "text/plain")
        assert (await http.get("/ready")).status_code == 503
        assert (await http.get("/broken")).status_code == 500
        assert (await http.get("/nothing")).status_code == 404
        assert (await http.post("/echo")).status_code == 405


@pytest.mark.parametrize(
    "data", [b"\r\n\r\n", b"GET /\r\n\r\n", b"GET http://[ HTTP/1.1\r\n\r\n", b"x" * 20_000, b"\xff\xfe"]
)
async def test_what_is_not_http_neither_hangs_nor_kills_the_server(port: int, data: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    writer.write_eof()
    answer = await asyncio.wait_for(reader.read(), 5)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400")
    writer.close()
    async with client() as http:
        assert (await http.get(f"http://127.0.0.1:{port}/text")).text == "plain"
