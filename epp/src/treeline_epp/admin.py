"""The admin port: a small HTTP/1.1 server for ``/metrics``, ``/ready``, ``/live`` and the debug pages. GET only."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from urllib.parse import parse_qsl, urlsplit

import msgspec

log = logging.getLogger(__name__)

_REQUEST_BYTES = 16 * 1024
_TIMEOUT_S = 10.0
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


class Page(msgspec.Struct, frozen=True):
    """An answer: bytes as they are, anything else as JSON."""

    body: object
    status: int = 200
    content_type: str = "application/json"


Handler = Callable[[Mapping[str, str]], Page]
"""From the query's parameters to a page."""


class Admin:
    """The server. ``pages`` maps paths to handlers; a handler that raises gives 500."""

    def __init__(self, pages: Mapping[str, Handler]) -> None:
        self._pages = pages
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port (useful for port 0). Raises OSError for a busy port."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=_REQUEST_BYTES)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                page = self._answer(head)
                body = page.body if isinstance(page.body, bytes) else msgspec.json.encode(page.body)
                writer.write(
                    f"HTTP/1.1 {page.status} {_REASONS[page.status]}\r\ncontent-type: {page.content_type}\r\n"
                    f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
                )
                writer.write(body)
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a client that does not speak, or has gone
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _answer(self, head: bytes) -> Page:
        words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(words) != 3:
            return Page({"error": "not an HTTP request"}, 400)
        if words[0] != "GET":
            return Page({"error": "only GET"}, 405)
        try:
            url = urlsplit(words[1])
            query = dict(parse_qsl(url.query))
        except ValueError:
            return Page({"error": "not a URL"}, 400)
        handler = self._pages.get(url.path)
        if handler is None:
            return Page({"error": "no such page", "pages": sorted(self._pages)}, 404)
        try:
            return handler(query)
        except Exception:
            log.exception("admin page %s failed", url.path)
            return Page({"error": "internal error"}, 500)
