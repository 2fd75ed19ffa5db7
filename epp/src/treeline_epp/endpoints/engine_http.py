"""Asking an engine over HTTP: bounded in time and size, whatever it answers."""

from __future__ import annotations

import asyncio
import ssl
from typing import TypeVar

import httpx
import msgspec

from treeline_epp.endpoints.bounded_reads import allow_body, new_transport
from treeline_epp.endpoints.spec import split_address

T = TypeVar("T")

_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Made once: by default each client would read all certificates of the system."""
_DOCUMENT_TIMEOUT_S = 5.0
_PROBE_BYTES, _DOCUMENT_BYTES = 64 << 10, 4 << 20
"""Longest answers of engines."""
_DOCUMENT_VALUES = 1 << 17
"""Values in a document, by its brackets and commas: 4096 models of vLLM have some 80 thousand. Reading costs by the
value, and the loop waits for it."""
_FEW_PARTS, _PART_BYTES = 256, 256
"""An answer may come in so many parts, and in more where they have this size on average: each costs as much as a
hundred kilobytes."""
_PASSING = frozenset({408, 425, 429})
_REFUSED = frozenset({401, 403})
_AS_IT_IS = {"accept-encoding": "identity"}


class EngineError(Exception):
    """The engine could not be asked, or its answer cannot be used."""


class UnusableError(EngineError):
    """It answers, and would answer the same again: in a shape that is not known, or that we may not ask."""


def new_http(key: httpx.Auth | None = None) -> httpx.AsyncClient:
    """A client for one engine, without TLS, which shows it this key. It keeps one connection."""
    # Only loopback and cluster addresses are asked; a proxy from the environment would be in the way.
    limits = httpx.Limits(max_connections=4, max_keepalive_connections=1)
    return httpx.AsyncClient(auth=key, trust_env=False, transport=new_transport(limits, _NO_TLS))


class RefusedError(UnusableError):
    """It answers those alone who show a key, which the picker has not."""


class EngineHttp:
    """One engine's HTTP interface. `host` is its own address, `base` its URL."""

    def __init__(self, http: httpx.AsyncClient, address: str) -> None:
        self.base = f"http://{address}"
        self.host = split_address(address)[0]
        self._http = http

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def probe(self, path: str, timeout_s: float) -> int:
        """The status of a probe. Raises `httpx.HTTPError` if the engine is out of reach."""
        status, _ = await self.fetch(path, timeout_s, _PROBE_BYTES)
        return status

    async def document(self, path: str, into: type[T]) -> T | None:
        """A decoded document; `None` for 404. Raises `EngineError`: `UnusableError` where asking again is in vain."""
        try:
            status, content = await self.fetch(path, _DOCUMENT_TIMEOUT_S, _DOCUMENT_BYTES)
            if status == 404:
                return None
            if status != 200:
                raise _error_of(status)(f"{self.base}{path} is answered {status}")
            if sum(map(content.count, (b"{", b"[", b","))) > _DOCUMENT_VALUES:
                raise UnusableError(f"{self.base}{path} has more values than are read")
            return msgspec.json.decode(content, type=into)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise UnusableError(f"{self.base}{path}: {error!r}") from error
        except httpx.HTTPError as error:
            raise EngineError(f"{self.base}{path}: {error!r}") from error

    async def fetch(self, path: str, total_s: float, most: int) -> tuple[int, bytes]:
        """Status and body of a GET that may take so long and be so large, all in all. Nothing is unpacked: a few
        kilobytes may unpack to gigabytes. Raises `httpx.HTTPError` and `EngineError`."""
        got, parts = bytearray(), 0
        try:
            async with asyncio.timeout(total_s):
                asked = self._http.stream("GET", self.base + path, headers=_AS_IT_IS, timeout=total_s)
                async with asked as response:
                    if response.headers.get("content-encoding", "identity") != "identity":
                        raise EngineError(f"{self.base}{path}: the answer is encoded, which was not asked for")
                    allow_body(response, most)
                    async for part in response.aiter_raw():
                        got += part
                        parts += 1
                        if len(got) > most:
                            raise EngineError(f"{self.base}{path}: the answer is longer than {most} bytes")
                        if parts > _FEW_PARTS + len(got) // _PART_BYTES:
                            raise EngineError(f"{self.base}{path}: the answer comes in crumbs")
        except TimeoutError:
            raise httpx.ReadTimeout(f"no whole answer within {total_s:g} s") from None
        return response.status_code, bytes(got)


def _error_of(status: int) -> type[EngineError]:
    if status in _REFUSED:
        return RefusedError
    return UnusableError if 400 <= status < 500 and status not in _PASSING else EngineError
