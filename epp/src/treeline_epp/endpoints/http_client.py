"""GETs to engines, by aiohttp, without TLS: bounded in time and size, whatever answers.

Redirects are answers like any other: no engine chooses with whom the picker talks. Nothing is taken from the
environment; only loopback and cluster addresses are asked, and a proxy would be in the way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final
from urllib.parse import quote

import aiohttp
from msgspec import Struct

IDLE_S: Final = 60.0
"""A connection on which nothing was asked for so long is not kept: its server may have gone without a word."""
_TARGET_SAFE: Final = "/?#[]@!$&'()*+,;=:%~"
_FEW_PIECES, _PIECE_BYTES = 256, 256
"""A body may come in so many pieces, and in more where they have this size on average: each costs as much as a hundred
kilobytes."""
_NOT_HTTP = (aiohttp.ClientResponseError, aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError)


class HttpError(Exception):
    """A server could not be asked, or its answer is none."""


class HttpTimeout(HttpError):
    """There was no whole answer in time."""


class NotHttp(HttpError):
    """Something answers, in a protocol that is not ours, or breaks off."""


class BadAnswer(HttpError):
    """An answer whose body cannot be had within the bounds: it is too long, or compressed, which was not asked for: a
    few kilobytes may unpack to gigabytes."""


class Answer(Struct, frozen=True):
    """A whole answer."""

    status: int
    body: bytes


class HttpClient:
    """See the module. `bearer` gives the API key to show, "" for none."""

    def __init__(self, bearer: Callable[[], str] = lambda: "") -> None:
        self._bearer = bearer
        self._session: aiohttp.ClientSession | None = None

    async def get(self, address: str, path: str, *, within_s: float, most: int, accept: str = "*/*") -> Answer:
        """The whole answer, whose body may have `most` bytes; `address` as in `EndpointSpec`. Raises `HttpError`."""
        url = f"http://{address}{quote(path, safe=_TARGET_SAFE)}"
        headers = {"accept": accept, "accept-encoding": "identity"}
        if key := self._bearer():
            headers["authorization"] = f"Bearer {key}"
        try:
            async with (
                asyncio.timeout(within_s),
                self._opened().get(url, headers=headers, allow_redirects=False) as answer,
            ):
                return Answer(answer.status, await _body(answer, most))
        except TimeoutError:
            raise HttpTimeout(f"no whole answer within {within_s:g} s") from None
        except _NOT_HTTP as error:
            raise NotHttp(str(error) or repr(error)) from error
        except (aiohttp.ClientError, OSError) as error:
            raise HttpError(str(error) or repr(error)) from error

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            )
        return self._session


async def _body(answer: aiohttp.ClientResponse, most: int) -> bytes:
    if answer.headers.get("content-encoding", "identity").lower() != "identity":
        raise BadAnswer("the answer is encoded, which was not asked for")
    body, pieces = bytearray(), 0
    async for piece in answer.content.iter_any():
        pieces += 1
        body += piece
        if len(body) > most:
            raise BadAnswer(f"the answer is longer than {most} bytes")
        if pieces > _FEW_PIECES + len(body) // _PIECE_BYTES:
            raise BadAnswer("the answer comes in crumbs")
    return bytes(body)
