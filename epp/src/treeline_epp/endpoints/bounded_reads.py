"""Connections to engines whose answers are bounded before they are parsed: by bytes, by how many pieces they come in,
and by responses that precede the one that counts.

HTTP libraries bound an answer's head but not how many interim responses (1xx) come before it, nor how often they are
woken for a byte: within a few seconds of waiting that is a core's work, in turns of a hundred milliseconds. The scraper
asks by aiohttp, all else by httpx; each has the same bounds here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from typing import Any, Final

import aiohttp
import httpcore
import httpx
from aiohttp.client_proto import ResponseHandler

_HEAD_BYTES: Final = 64 << 10
"""What comes before a body, interim responses and all."""
_HEAD_PIECE: Final = 4 << 10
"""Read at a time of a head: as interim responses it takes 5 ms."""
_FEW_READS, _READ_BYTES = 256, 256
"""An answer may be read in so many pieces, and in more where they have this size on average."""
_INTERIM: Final = re.compile(rb"HTTP/1\.[01] 1\d\d")
_MOST_INTERIM: Final = 8


def new_transport(limits: httpx.Limits, verify: Any) -> httpx.AsyncHTTPTransport:
    """A transport of httpx over bounded connections."""
    transport = httpx.AsyncHTTPTransport(verify=verify, trust_env=False, limits=limits)
    # httpx has no other way to name a network backend.
    transport._pool = httpcore.AsyncConnectionPool(
        ssl_context=verify,
        max_connections=limits.max_connections,
        max_keepalive_connections=limits.max_keepalive_connections,
        keepalive_expiry=limits.keepalive_expiry,
        network_backend=_BoundedBackend(),
    )
    return transport


def allow_body(response: httpx.Response, most: int) -> None:
    """The head of the response is there: its body may have `most` bytes, and what chunks and trailers add."""
    stream = response.extensions.get("network_stream")
    if isinstance(stream, _BoundedStream):
        stream.most = 2 * most + _HEAD_BYTES


class _BoundedBackend(httpcore.AsyncNetworkBackend):
    def __init__(self) -> None:
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 -- httpcore's interface
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        return _BoundedStream(await self._inner.connect_tcp(host, port, timeout, local_address, socket_options))


class _BoundedStream(httpcore.AsyncNetworkStream):
    """`most` bytes may come since the last request; until a body is allowed that is a head."""

    def __init__(self, inner: httpcore.AsyncNetworkStream) -> None:
        self.most = _HEAD_BYTES
        self._inner = inner
        self._bytes = self._reads = 0

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109
        piece = _HEAD_PIECE if self.most == _HEAD_BYTES else max_bytes
        data = await self._inner.read(min(piece, max_bytes), timeout)
        self._bytes += len(data)
        self._reads += 1
        if self._bytes > self.most:
            raise httpcore.ReadError("the answer is longer than is read")
        if self._reads > _FEW_READS + self._bytes // _READ_BYTES:
            raise httpcore.ReadError("the answer comes in crumbs")
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        self.most = _HEAD_BYTES
        self._bytes = self._reads = 0
        await self._inner.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._inner.aclose()

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


class BoundedConnector(aiohttp.TCPConnector):
    """aiohttp's, whose connections break where an answer exceeds the bounds. How long a body is, is its reader's."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        handler: type[ResponseHandler] = _BoundedHandler
        self._factory = partial(handler, loop=self._loop)


class _BoundedHandler(ResponseHandler):
    _bytes = _reads = _interim = 0

    def set_response_params(self, **settings: Any) -> None:
        self._bytes = self._reads = self._interim = 0
        super().set_response_params(**settings)

    def data_received(self, data: bytes) -> None:
        self._bytes += len(data)
        self._reads += 1
        self._interim += len(_INTERIM.findall(data))
        if self._interim <= _MOST_INTERIM and self._reads <= _FEW_READS + self._bytes // _READ_BYTES:
            super().data_received(data)
        elif self.transport is not None:
            self.transport.abort()
