"""One connection of an HTTP/1.1 server that streams: asyncio outside, httptools inside."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import cast

import httptools

CASE_HEADER = "x-bench-case"
"""Header with the name of a request's prompt, so that an engine answers without tokenizing 220 KB."""
_CASE = CASE_HEADER.encode()
MAX_BODY_BYTES = 32 << 20
MAX_URL_BYTES = 8192


class Connection(asyncio.Protocol):
    """Reads whole requests, one at a time, and passes them to `serve(connection, method, path, body)`, which answers
    with `send`, or with `start`, `chunk`, …, `end`, or with `write` of a whole answer. `on_gone` is called when the
    client disconnects before its answer has ended. A body over the limit gets 413; invalid HTTP closes the connection.
    """

    def __init__(self, serve: Callable[[Connection, str, str, bytes], None]) -> None:
        self.case = ""
        """The value of the request's `CASE_HEADER`."""
        self._serve = serve
        self.on_gone: Callable[[], None] | None = None
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body: list[bytes] = []
        self._size = 0
        self._answering = False

    # From asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.cut()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        gone, self.on_gone = self.on_gone, None
        if gone is not None:
            gone()

    # From the parser

    def on_message_begin(self) -> None:
        self._url, self._body, self._size, self.case = b"", [], 0, ""

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == _CASE:
            self.case = value.decode("latin-1")

    def on_url(self, url: bytes) -> None:
        self._url += url
        if len(self._url) > MAX_URL_BYTES:
            self.cut()

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size <= MAX_BODY_BYTES:
            self._body.append(body)
        else:
            self._body.clear()

    def on_message_complete(self) -> None:
        if self._answering:  # a second request before the first was answered
            self.cut()
            return
        self._answering = True
        if self._size > MAX_BODY_BYTES:
            self.send(413, b'{"error":{"message":"the body is over 32 MiB","type":"invalid_request_error"}}')
            return
        path = self._url.partition(b"?")[0].decode("latin-1")
        self._serve(self, self._parser.get_method().decode("latin-1"), path, b"".join(self._body))

    # Answers

    def send(
        self,
        status: int,
        content: bytes,
        headers: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> None:
        """Send a whole answer."""
        self.write(response(status, content, headers, content_type))

    def write(self, answer: bytes) -> None:
        """Send a whole answer that is encoded already."""
        self._write(answer)
        self._done()

    def start(self, headers: Mapping[str, str]) -> None:
        """Send the head of a stream of events."""
        self._write(_head(200, {"transfer-encoding": "chunked", **headers}, "text/event-stream"))

    def chunk(self, content: bytes) -> None:
        """Send a part of the stream."""
        self._write(b"%x\r\n%b\r\n" % (len(content), content))

    def end(self) -> None:
        """End the stream."""
        self._write(b"0\r\n\r\n")
        self._done()

    def _done(self) -> None:
        self._answering = False
        self.on_gone = None
        if not self._parser.should_keep_alive():
            self.cut()

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def cut(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()


def response(
    status: int, content: bytes, headers: Mapping[str, str] | None = None, content_type: str = "application/json"
) -> bytes:
    """Return the bytes of a whole answer."""
    return _head(status, {"content-length": str(len(content)), **(headers or {})}, content_type) + content


def _head(status: int, headers: Mapping[str, str], content_type: str) -> bytes:
    lines = [f"HTTP/1.1 {status} {_REASONS.get(status, 'Error')}", f"content-type: {content_type}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 413: "Content Too Large", 503: "Service Unavailable"}
