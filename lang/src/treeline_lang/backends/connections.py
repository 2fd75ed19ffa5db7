"""HTTP/1.1 to one server over reused connections, one request at a time on each.

A general HTTP client costs more than the rest of a program's step. Here a request is one write, and llhttp (httptools)
reads the answer, at a cost that does not grow with the requests in flight.
"""

from __future__ import annotations

import asyncio
import base64
import resource
import ssl
import urllib.request
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Final, Self
from urllib.parse import SplitResult, quote, unquote, urlsplit

import httptools

_KEPT_S: Final = 4.0
"""Idle connections are closed after this time, before servers do it (many: after 5 s)."""
_MOST: Final = 1024
_MOST_CONNECT_S: Final = 10.0
_HELD_BYTES: Final = 1 << 20
"""Unread bytes of a body that are buffered; then the server has to wait. Also the limit of the headers."""


class CannotConnect(Exception):
    pass


class BrokeOff(Exception):
    """The server closed the connection, or its answer is not HTTP."""


class Response(asyncio.Protocol):
    """A connection, and the answer to its latest request."""

    status = 0
    """0 while headers are incomplete."""

    def __init__(self, owner: Connections) -> None:
        self._owner = owner
        self._parser = httptools.HttpResponseParser(self)
        self._transport = asyncio.Transport()
        self._woken: asyncio.Future[None] | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._broken: str | None = None
        self._begin()

    def _begin(self) -> None:
        self.status, self.reason = 0, ""
        self.headers: dict[str, str] = {}
        """Headers by their names in lower case."""
        self.heard = self._complete = self._stays = False
        self._parts: deque[bytes] = deque()
        self._held = self._no_body = 0

    async def send(self, request: bytes) -> Self:
        """Returns when the response headers are there. Raises BrokeOff, TimeoutError."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        self._begin()
        self._transport.write(request)
        try:
            while not self.status:
                await self._wait()
        except BaseException:
            self.abort()
            raise
        return self

    async def parts(self) -> AsyncGenerator[bytes]:
        """Yields the body in pieces as they arrive. Raises BrokeOff, TimeoutError."""
        if (packing := self.headers.get("content-encoding", "identity").lower()) != "identity":
            raise BrokeOff(f"its answer is packed as {packing!r}, which was not asked for")
        while True:
            while self._parts:
                part = self._parts.popleft()
                self._held -= len(part)
                yield part
            if self._complete:
                return
            self._transport.resume_reading()
            await self._wait()

    def give_back(self) -> None:
        """Ends the request, whether or not it was read to its end."""
        if not self._complete or not self._stays or self._broken is not None:
            self.abort()
            return
        self._transport.resume_reading()
        self._expiry = asyncio.get_running_loop().call_later(_KEPT_S, self.abort)
        self._owner.idle.append(self)

    def abort(self) -> None:
        self._transport.abort()

    async def secure(self, inner: Response, tls: ssl.SSLContext, host: str | None) -> asyncio.BaseTransport:
        """Hands the transport, with TLS started, to `inner`; this object is no longer a connection."""
        self._owner.all.discard(self)
        made = await asyncio.get_running_loop().start_tls(self._transport, inner, tls, server_hostname=host)
        assert made is not None
        return made

    async def _wait(self) -> None:
        if self._broken is not None:
            raise BrokeOff(self._broken)
        self._woken = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(self._owner.timeout_s):
            await self._woken

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    def _break(self, reason: str) -> None:
        self._broken = self._broken or reason
        self.abort()
        self._wake()

    # ---- what comes -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._owner.all.add(self)

    def data_received(self, data: bytes) -> None:
        self.heard = True
        self._no_body += len(data)
        try:
            if self._expiry is not None:
                raise httptools.HttpParserError("it sent an answer without a request")
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._break(f"its answer is not HTTP: {error}")
        if self._no_body > _HELD_BYTES:
            self._break("its headers have no end")
        if self._held > _HELD_BYTES:
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._owner.all.discard(self)
        if self._expiry is not None:
            self._expiry.cancel()
            self._owner.idle.remove(self)
        measured = "content-length" in self.headers or "transfer-encoding" in self.headers
        if self.status and error is None and self._broken is None and not measured:
            self._complete = True  # it ends with the connection
        self._break(str(error or "the connection was closed"))

    def on_status(self, reason: bytes) -> None:
        self.reason = reason.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # another follows
            self.headers.clear()
        else:
            self.status = status

    def on_body(self, part: bytes) -> None:
        self._parts.append(part)
        self._held += len(part)
        self._no_body = 0

    def on_message_complete(self) -> None:
        self._complete = self.status >= 200
        self._stays = self._parser.should_keep_alive()


class Connections:
    """The connections to one server. Requests beyond the limit wait for a free connection."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout_s: float) -> None:
        """url: of the server; proxies come from the environment. headers: sent with every request. timeout_s: the
        longest silence of the server."""
        self._server = urlsplit(url)
        self._proxy = _proxy_for(self._server)
        self._tls = _tls_for(self._server)
        self.timeout_s = timeout_s
        self.idle: list[Response] = []
        """The last used is used next, so that the others grow old and are closed."""
        self.all: set[Response] = set()
        authority = self._server.netloc.rpartition("@")[2].encode("idna").decode()
        self._target = quote(self._server.path, safe="/%:@!$&'()*+,;=~")
        fixed = {
            "host": authority,
            "user-agent": "treeline-lang",
            "accept": "*/*",
            "accept-encoding": "identity",
            **headers,
        }
        if self._proxy is not None and self._tls is None:
            self._target = f"http://{authority}{self._target}"
            fixed |= authorization("proxy-authorization", self._proxy)
        self._fixed = _lines(fixed)
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._slots = asyncio.Semaphore(_MOST if files < 0 else max(min(_MOST, files // 2), 1))

    @asynccontextmanager
    async def request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> AsyncGenerator[Response]:
        """A context manager with the answer. Leaving it early ends the request. Raises CannotConnect, BrokeOff,
        TimeoutError."""
        lines = f"{self._fixed}{_lines(headers)}content-length: {len(body)}"
        head = f"{method} {self._target}{path} HTTP/1.1\r\n{lines}\r\n\r\n"
        async with self._slots:
            response = await self._ask(head.encode("latin-1") + body)
            try:
                yield response
            finally:
                response.give_back()

    async def close(self) -> None:
        for response in list(self.all):
            response.abort()
        await asyncio.sleep(0)  # then their sockets are closed

    async def _ask(self, request: bytes) -> Response:
        if self.idle:
            used_before = self.idle.pop()
            try:
                return await used_before.send(request)
            except BrokeOff:
                if used_before.heard:
                    raise
            # it was closed while it was idle: a new one
        return await (await self._connect()).send(request)

    async def _connect(self) -> Response:
        loop, server, proxy = asyncio.get_running_loop(), self._server, self._proxy
        to, tls = (server, self._tls) if proxy is None else (proxy, _tls_for(proxy))
        try:
            async with asyncio.timeout(min(self.timeout_s, _MOST_CONNECT_S)):
                _, made = await loop.create_connection(
                    lambda: Response(self), to.hostname or "", _port(to), ssl=tls, happy_eyeballs_delay=0.25
                )
                if proxy is None or self._tls is None:
                    return made
                where = f"{server.hostname}:{_port(server)}"
                lines = {"host": where, **authorization("proxy-authorization", proxy)}
                await made.send(f"CONNECT {where} HTTP/1.1\r\n{_lines(lines)}\r\n".encode("latin-1"))
                if made.status != 200:
                    made.abort()
                    raise CannotConnect(f"the environment's proxy answered {made.status}")
                secured = Response(self)
                secured.connection_made(await made.secure(secured, self._tls, server.hostname))
                return secured
        except TimeoutError:
            raise CannotConnect("no answer") from None
        except (OSError, UnicodeError, BrokeOff) as error:
            raise CannotConnect(str(error)) from error


def authorization(name: str, url: SplitResult) -> dict[str, str]:
    """The Authorization header for a URL's user and password, if it has them."""
    if url.username is None:
        return {}
    pair = f"{unquote(url.username)}:{unquote(url.password or '')}"
    return {name: f"Basic {base64.b64encode(pair.encode()).decode()}"}


def _proxy_for(server: SplitResult) -> SplitResult | None:
    """The proxy from the environment; its scheme may be missing. Raises CannotConnect."""
    proxies = {} if urllib.request.proxy_bypass(server.hostname or "") else urllib.request.getproxies()
    found = proxies.get(server.scheme) or proxies.get("all")
    return None if found is None else urlsplit(found if "://" in found else f"http://{found}")


def _tls_for(url: SplitResult) -> ssl.SSLContext | None:
    """Raises CannotConnect for an unknown kind of proxy."""
    if url.scheme not in ("http", "https"):
        raise CannotConnect(f"the environment's proxy cannot be used: it begins with {url.scheme}://")
    return ssl.create_default_context() if url.scheme == "https" else None


def _port(url: SplitResult) -> int:
    return url.port or (443 if url.scheme == "https" else 80)


def _lines(headers: Mapping[str, str]) -> str:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())
