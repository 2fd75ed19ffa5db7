"""A minimal HTTP/1.1 server: one asyncio protocol, answers that were encoded beforehand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import cast

import httptools

CASE_HEADER = "x-bench-case"
"""Names the prompt of a request, so that the simulated engine need not tokenize 220 KB to answer at once."""


def response(content: bytes, headers: Mapping[str, str] | None = None, status: str = "200 OK") -> bytes:
    """The bytes of a JSON response."""
    lines = [f"HTTP/1.1 {status}", "content-type: application/json", f"content-length: {len(content)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode() + content


Answer = Callable[[str, str, str], bytes]
"""(method, path, value of CASE_HEADER or "") → the whole response."""


class SimProtocol(asyncio.Protocol):
    """One connection. Bodies are read and forgotten."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._url = b""
        self._case = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none of its subclasses

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            assert self._transport is not None
            self._transport.close()

    def on_message_begin(self) -> None:
        self._url, self._case = b"", ""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == CASE_HEADER.encode():
            self._case = value.decode("latin-1")

    def on_message_complete(self) -> None:
        assert self._transport is not None
        path = self._url.partition(b"?")[0].decode("latin-1")
        self._transport.write(self._answer(self._parser.get_method().decode(), path, self._case))
        if not self._parser.should_keep_alive():
            self._transport.close()
