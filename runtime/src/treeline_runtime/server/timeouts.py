"""Connections that do not go on: a request must arrive within a time, and its headers in a bounded number of bytes.

uvicorn's protocol for HTTP/1.1 knows a timeout only for connections between requests. This adds those within one. It
also serves a request that offers another protocol (`Upgrade: h2c`) as the HTTP/1.1 that it is.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from treeline_wire.openai_errors import error_body
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from treeline_runtime.server.pacing import encode_json

SILENT_S = 75.0
"""For a new connection to begin its first request. Browsers and proxies open some ahead."""
HEADERS_S = 15.0
"""For the headers of a request, from their first byte."""
BODY_PAUSE_S = 20.0
"""Between parts of a body."""
BODY_S = 180.0
"""For a whole body."""
STALLED_S = 300.0
"""For a client that takes nothing of an answer that is there for it."""
LINGER_S = 1.0
"""For a client that still sends to see why it was refused."""
MAX_HEADER_BYTES = 64 << 10


class HttpProtocol(HttpToolsProtocol):
    """One connection. A request that does not arrive in time is answered 408, and the connection closed."""

    silent_s, headers_s, body_pause_s, body_s, stalled_s = (
        SILENT_S,
        HEADERS_S,
        BODY_PAUSE_S,
        BODY_S,
        STALLED_S,
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._arrival: asyncio.TimerHandle | None = None
        """For what has to arrive next of a request."""
        self._stall: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        """Of the headers that are complete."""
        self._unfinished_bytes = 0
        """That came since the headers began, but for the first part."""
        self._in_headers = False
        self._refused = False
        self._body_until = 0.0
        self._offers_upgrade = False
        """The parser is at the end of headers after which it would leave HTTP/1.1."""

    # ---- the connection -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect(self.silent_s, "")

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        self._flowing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._in_headers:
            self._unfinished_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        if self._in_headers and max(self._unfinished_bytes, self._header_bytes) > MAX_HEADER_BYTES:
            self._refuse(431, f"The headers are larger than {MAX_HEADER_BYTES} bytes")

    def _feed(self, data: bytes) -> None:
        """Parses what came. Raises HttpParserError.

        The parser stops behind a request that offers another protocol, as if its body were of that one. A server may
        ignore the offer (RFC 9110, 7.8), so another parser starts over with the same headers but for `Upgrade`.
        """
        rest = memoryview(data)
        while True:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as stop:
                if not self._offers_upgrade:  # CONNECT: what follows is for a tunnel that there is not
                    self._refused = True
                    self.send_400_response("CONNECT is not supported.")
                    return
                rest = rest[stop.args[0] :]
                head = self._head_without_upgrade()
                self._offers_upgrade = False
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
                self.parser.feed_data(head)

    def _head_without_upgrade(self) -> bytes:
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def pause_writing(self) -> None:
        super().pause_writing()
        self._flowing()
        self._stall = self.loop.call_later(self.stalled_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._flowing()
        super().resume_writing()

    def _flowing(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    # ---- the request, as it arrives ---------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers, self._header_bytes, self._unfinished_bytes = True, 0, 0
        self._expect(self.headers_s, "headers")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        if self.parser.should_upgrade():
            self._offers_upgrade = self.parser.get_method() != b"CONNECT"
            return
        self._body_until = self.loop.time() + self.body_s
        self._expect(self.body_pause_s, "body")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._expect(max(0.0, min(self.body_pause_s, self._body_until - self.loop.time())), "body")
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._arrived()
        super().on_message_complete()

    def _expect(self, seconds: float, what: str) -> None:
        self._arrived()
        self._arrival = self.loop.call_later(seconds, self._late, what)

    def _arrived(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _late(self, what: str) -> None:
        if what == "body" and self.flow.read_paused and self.loop.time() < self._body_until:
            self._expect(self.body_pause_s, what)  # it is we who do not read
            return
        self._refuse(408, f"The request's {what} did not arrive in time" if what else "")

    def _refuse(self, status: int, message: str) -> None:
        """Says why, unless nothing has been asked or an answer has begun, and closes the connection."""
        self._arrived()
        waiting = self.cycle is not None and not self.cycle.response_complete
        if message and not (waiting and self.cycle.response_started):
            body = encode_json(error_body(message, "invalid_request_error", None, "request_timeout"))
            self.transport.write(
                b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
                % (
                    status,
                    b"Request Timeout" if status == 408 else b"Request Header Fields Too Large",
                    len(body),
                )
                + body
            )
        if waiting:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._refused = True
        # Closing a connection on which more has come resets it, and the client would not see why.
        self.loop.call_later(LINGER_S if status == 431 else 0, self.transport.close)
