"""The picker's pages, on two ports: one shows metrics, the other probes, endpoints and the debug pages. GET only:
nothing of the picker can be changed over HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping

import msgspec
from aiohttp import web
from treeline_wire.browsers import foreign_host, page_request
from treeline_wire.security import is_loopback

log = logging.getLogger(__name__)
_http_log = logging.getLogger(f"{__name__}.http")
_http_log.setLevel(logging.CRITICAL)  # it would write a traceback for whatever is not HTTP

_TIMEOUT_S = 10.0
"""A connection is for one request, and lasts no longer than this."""


class Page(msgspec.Struct, frozen=True):
    """An answer: bytes as they are, anything else as JSON."""

    body: object
    status: int = 200
    content_type: str = "application/json"


Handler = Callable[[Mapping[str, str]], Page]
"""From the query's parameters to a page."""


class PageServer:
    """The server of one port. `pages` maps paths to handlers; a handler that raises gives 500.

    `private` are the paths of pages that only a client on this machine (in this pod) may see, and no web page that
    its browser shows: whoever may start a process there or forward a port to it.
    """

    def __init__(self, pages: Mapping[str, Handler], private: Collection[str] = ()) -> None:
        self._pages = pages
        self._private = private
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, logger=_http_log)
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port (useful for port 0). Raises OSError for a busy port."""
        await self._runner.setup()
        self._server = await asyncio.get_running_loop().create_server(self._connection, host, port)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()

    def _connection(self) -> asyncio.Protocol:
        server = self._runner.server
        assert server is not None
        protocol = server()
        asyncio.get_running_loop().call_later(_TIMEOUT_S, protocol.force_close)
        return protocol

    async def _serve(self, request: web.Request) -> web.Response:
        page = self._answer(request)
        body = page.body if isinstance(page.body, bytes) else msgspec.json.encode(page.body)
        response = web.Response(body=body, status=page.status, headers={"Content-Type": page.content_type})
        response.force_close()
        return response

    def _answer(self, request: web.Request) -> Page:
        if request.method != "GET":
            return Page({"error": "only GET"}, 405)
        handler = self._pages.get(request.path)
        if handler is None:
            return Page({"error": "no such page", "pages": sorted(self._pages)}, 404)
        transport = request.transport
        own_address = "" if transport is None else str(transport.get_extra_info("sockname")[0])
        if why := self._why_refused(request.path, request.raw_headers, own_address):
            return Page({"error": f"only for clients on this machine: {why}"}, 403)
        try:
            return handler(request.query)
        except Exception:
            log.exception("admin page %s failed", request.path)
            return Page({"error": "internal error"}, 500)

    def _why_refused(self, path: str, headers: Iterable[tuple[bytes, bytes]], own_address: str) -> str | None:
        """Whoever reaches another address of ours comes from the cluster's network; whoever reaches loopback may be a
        browser that was told to by a web page.
        """
        if path in self._private or is_loopback(own_address):
            return why_not_local(headers, own_address)
        return None


def why_not_local(headers: Iterable[tuple[bytes, bytes]], own_address: str) -> str | None:
    """Why a request did not come from a client on this machine, or None. `own_address` is where it arrived."""
    if not is_loopback(own_address):
        return f"the request came to {own_address}"
    found = [(name.strip().lower(), value.strip()) for name, value in headers]
    return page_request(found) or foreign_host(found)
