"""The HTTP servers of the picker's two ports: one shows metrics, the other probes, endpoints and the debug pages. They
only read: nothing of the picker can be changed over HTTP. Requests are GET or HEAD, except for pages that need a body.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import msgspec
from aiohttp import web
from treeline_wire import headers as names
from treeline_wire.browsers import foreign_host, page_request
from treeline_wire.security import is_loopback

log = logging.getLogger(__name__)
_http_log = logging.getLogger(f"{__name__}.http")
_http_log.setLevel(logging.CRITICAL)  # it would log a traceback for input that is not HTTP

_EDGE = names.EDGE.encode()
_SAME_ORIGIN = (b"sec-fetch-site", b"same-origin")
_READ = ("GET", "HEAD")

PROBES = frozenset({"/live", "/ready"})
"""Paths that the kubelet asks, or a mesh's proxy for it: by the pod's address, and from within the pod."""
_TIMEOUT_S = 10.0
"""Longest life of a connection, which serves one request."""
_MOST_STREAMS = 16
"""Most clients of streams at once: an operator and its successor, and people's browsers."""


class Page(msgspec.Struct, frozen=True):
    """An answer: bytes as they are, anything else as JSON."""

    body: object
    status: int = 200
    content_type: str = "application/json"
    headers: Mapping[str, str] = {}


Handler = Callable[[Mapping[str, str]], Page | Awaitable[Page]]
"""Makes a page from the query's parameters."""
Question = Callable[[bytes], Page | Awaitable[Page]]
"""Makes a page from the body of a POST, and changes nothing."""


@dataclass(frozen=True, slots=True)
class Stream:
    """An endless page. `pieces` yields its parts to one client until that client disconnects."""

    pieces: Callable[[], AsyncGenerator[bytes]]
    content_type: str


class PageServer:
    """The server of one port. `pages` maps paths to handlers; a handler that raises gives 500. `streams` are open to
    `_MOST_STREAMS` clients at once, each of which must take a piece within the time that a page may last.

    A request to a loopback address must name that address as its Host and must not come from a web page: other sites'
    pages in a browser on this machine can reach it, too. `PROBES` alone are open to all.

    `private` are the paths of pages for clients on this machine (in this pod) only, not for web pages in their
    browsers: the reader may start a process there or forward a port to it. `own` are the paths of a web page of this
    server and of what that page loads. Those that are not private hold no data, so everybody may see them; scripts of
    the same origin may ask for the private ones. A gateway may lead its clients to `own` paths: our Envoy marks the
    requests that it passes on, and they get nothing private. `questions` are pages that are asked by POST, with at most
    `question_bytes`.
    """

    def __init__(
        self,
        pages: Mapping[str, Handler],
        private: Collection[str] = (),
        own: Collection[str] = (),
        streams: Mapping[str, Stream] | None = None,
        questions: Mapping[str, Question] | None = None,
        question_bytes: int = 1 << 20,
    ) -> None:
        self._pages = pages
        self._private = private
        self._own = own
        self._streams = streams or {}
        self._questions = questions or {}
        self._streaming: set[asyncio.Task[object]] = set()
        self._deadlines: dict[object, asyncio.TimerHandle] = {}
        app = web.Application(client_max_size=question_bytes)
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
        for task in self._streaming:
            task.cancel()
        await self._runner.cleanup()

    def _connection(self) -> asyncio.Protocol:
        server = self._runner.server
        assert server is not None
        protocol = server()
        self._deadlines[protocol] = asyncio.get_running_loop().call_later(_TIMEOUT_S, self._expire, protocol)
        return protocol

    def _expire(self, protocol: web.RequestHandler) -> None:
        del self._deadlines[protocol]
        protocol.force_close()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        why = self._why_not(request)
        stream = self._streams.get(request.path) if request.method in _READ and why is None else None
        if stream is not None and len(self._streaming) < _MOST_STREAMS:
            return await self._send(request, stream)
        page = await self._answer(request) if why is None else Page({"error": why}, 403)
        body = page.body if isinstance(page.body, bytes) else msgspec.json.encode(page.body)
        response = web.Response(
            body=body, status=page.status, headers={**page.headers, "Content-Type": page.content_type}
        )
        response.force_close()
        return response

    async def _send(self, request: web.Request, stream: Stream) -> web.StreamResponse:
        if (deadline := self._deadlines.pop(request.protocol, None)) is not None:
            deadline.cancel()
        task = asyncio.current_task()
        assert task is not None
        self._streaming.add(task)
        response = web.StreamResponse(headers={"Content-Type": stream.content_type})
        response.force_close()
        try:
            await response.prepare(request)
            if request.method == "HEAD":
                return response
            async with contextlib.aclosing(stream.pieces()) as pieces:
                async for piece in pieces:
                    async with asyncio.timeout(_TIMEOUT_S):
                        await response.write(piece)
        except (ConnectionError, TimeoutError):
            request.protocol.force_close()
        except Exception:
            log.exception("stream %s failed", request.path)
            request.protocol.force_close()
        finally:
            self._streaming.discard(task)
        return response

    async def _answer(self, request: web.Request) -> Page:
        if request.path in self._streams and request.method in _READ:
            return Page({"error": f"{_MOST_STREAMS} clients follow it already"}, 503)
        question = self._questions.get(request.path)
        methods = _READ if question is None else ("POST",)
        if request.method not in methods:
            return Page({"error": f"only {' and '.join(methods)}"}, 405, headers={"Allow": ", ".join(methods)})
        handler = self._pages.get(request.path)
        if handler is None and question is None:
            # Those beside it: a gateway leads to one folder, whose clients need not learn of the others.
            folder = request.path[: request.path.rfind("/") + 1]
            pages = [page for page in (*self._pages, *self._streams, *self._questions) if page.startswith(folder)]
            return Page({"error": "no such page", "pages": sorted(pages)}, 404)
        try:
            if question is not None:
                page = question(await request.read())
            else:
                assert handler is not None
                page = handler(request.query)
            return page if isinstance(page, Page) else await page
        except web.HTTPRequestEntityTooLarge as error:
            return Page({"error": f"the question is too long: {error.text}"}, 413)
        except Exception:
            log.exception("admin page %s failed", request.path)
            return Page({"error": "internal error"}, 500)

    def _why_not(self, request: web.Request) -> str | None:
        """Return why the request is refused, or None. Requests to loopback must name it; private pages are shown only
        there. Files of `own` that are not private hold no data, so any Host will do.
        """
        transport, headers, path = request.transport, request.raw_headers, request.path
        own_address = "" if transport is None else str(transport.get_extra_info("sockname")[0])
        private = path in self._private
        if path in PROBES or not (private or (is_loopback(own_address) and path not in self._own)):
            return None
        if private and any(name.lower() == _EDGE for name, _ in headers):
            return f"{_LOCAL}: the request came through a gateway"
        if path in self._own:
            # Requests for modules also carry an Origin; where it equals the Host, the page is our own.
            same = {_SAME_ORIGIN, (b"origin", f"http://{request.host}".encode("latin-1"))}
            headers = tuple(each for each in headers if (each[0].lower(), each[1]) not in same)
        why = why_not_local(headers, own_address) or (_passed_on(headers) if private else None)
        return f"{_LOCAL}: {why}" if why else None


_LOCAL = "only for clients on this machine"


def why_not_local(headers: Iterable[tuple[bytes, bytes]], own_address: str) -> str | None:
    """Return why a request did not come from a client on this machine, or None. `own_address` is where it arrived."""
    if not is_loopback(own_address):
        return f"the request came to {own_address}"
    found = [(name.strip().lower(), value.strip()) for name, value in headers]
    return page_request(found) or foreign_host(found)


_OF_PROXIES = frozenset({b"forwarded", b"via", b"x-forwarded-host", b"x-forwarded-server", b"x-real-ip"})


def _passed_on(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return which header shows that a proxy passed the request on; None if no header does. Our Envoy sends none of
    these and one address in `X-Forwarded-For`; a proxy before Envoy makes that two."""
    for name, value in headers:
        if name.lower() in _OF_PROXIES or (name.lower() == b"x-forwarded-for" and b"," in value):
            return f"a proxy passed it on ({name.decode('latin-1')}: {value.decode('latin-1')[:100]})"
    return None
