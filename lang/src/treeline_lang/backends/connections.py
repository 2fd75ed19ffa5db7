"""Connections to one server, each used by a request at a time.

httpx's own pool looks at all its requests and connections whenever one comes or goes: with some hundreds in flight, as
programs have, that takes most of a core. Here a request costs the same however many there are.
"""

from __future__ import annotations

import asyncio
import resource
import ssl
import urllib.request
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Final, cast
from urllib.parse import urlsplit

import httpx

_KEPT_S: Final = 4.0
"""For so long idle connections are kept: shorter than servers do (many: 5 s), so that none closes one just when it is
used again."""
_MOST: Final = 1024


class Connections(httpx.AsyncBaseTransport):
    """A transport for httpx. Those above the limit wait for one to be free."""

    def __init__(self, url: str) -> None:
        """url: of the server; whether it is reached through a proxy says the environment, as usual."""
        scheme, host = urlsplit(url).scheme, urlsplit(url).hostname or ""
        self._proxy = None if urllib.request.proxy_bypass(host) else _proxy_for(scheme)
        plain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # for none, each connection would make one of its own
        self._ssl = httpx.create_ssl_context() if scheme == "https" else plain
        self._free: deque[tuple[httpx.AsyncHTTPTransport, float]] = deque()
        """With the time since when. The last used is used next, so that the others grow old and are closed."""
        self._all: set[httpx.AsyncHTTPTransport] = set()
        self._closing: asyncio.Task[None] | None = None
        """Of idle ones, while there are any."""
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._slots = asyncio.Semaphore(_MOST if files < 0 else max(min(_MOST, files // 2), 1))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await self._slots.acquire()
        used_before = bool(self._free)
        try:
            connection = self._free.pop()[0] if used_before else self._new()
        except BaseException:
            self._slots.release()
            raise
        try:
            try:
                response = await connection.handle_async_request(request)
            except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
                if not used_before:
                    raise
                response = await connection.handle_async_request(request)  # the idle connection was closed: a new one
        except BaseException:
            self._give_back(connection)
            raise
        stream = cast(httpx.AsyncByteStream, response.stream)
        response.stream = _Stream(stream, lambda: self._give_back(connection))
        return response

    async def aclose(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
        while self._all:
            await self._all.pop().aclose()

    def _new(self) -> httpx.AsyncHTTPTransport:
        one = httpx.Limits(max_connections=1, keepalive_expiry=_KEPT_S)
        try:
            connection = httpx.AsyncHTTPTransport(verify=self._ssl, limits=one, proxy=self._proxy)
        except (ValueError, ImportError) as error:  # of a kind that httpx does not know
            raise httpx.ProxyError(f"the environment's proxy cannot be used: {error}") from error
        self._all.add(connection)
        return connection

    def _give_back(self, connection: httpx.AsyncHTTPTransport) -> None:
        self._free.append((connection, asyncio.get_running_loop().time()))
        self._slots.release()
        if self._closing is None:
            self._closing = asyncio.create_task(self._close_idle())

    async def _close_idle(self) -> None:
        """Servers close them, too, but until this side has done so they are open files."""
        while self._free:
            connection, since = self._free[0]
            left_s = since + _KEPT_S - asyncio.get_running_loop().time()
            if left_s > 0:
                await asyncio.sleep(left_s)
                continue
            self._free.popleft()
            self._all.discard(connection)
            with suppress(Exception):  # whatever it says: it is not used again
                await connection.aclose()
        self._closing = None


def _proxy_for(scheme: str) -> str | None:
    """What the environment says, where many leave the scheme of the proxy out."""
    proxies = urllib.request.getproxies()
    found = proxies.get(scheme) or proxies.get("all")
    return found if found is None or "://" in found else f"http://{found}"


class _Stream(httpx.AsyncByteStream):
    """An answer's body; `over` is called once, when it is closed."""

    def __init__(self, stream: httpx.AsyncByteStream, over: Callable[[], None]) -> None:
        self._stream, self._over = stream, over
        self._closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            yield part

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            await self._stream.aclose()
        finally:
            self._over()
