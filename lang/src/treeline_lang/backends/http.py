"""Requests to servers over HTTP: typed errors, patience with busy ones, a stream's events."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Final

import httpx

from treeline_lang.backends.connections import Connections
from treeline_lang.errors import BackendError, Refused, Unreachable

_BUSY: Final = (429, 503, 529)
"""529 is Anthropic's word for overloaded."""
_MAX_WAIT_S: Final = 30.0
"""Of one pause; servers say how long they want to be left alone (Retry-After)."""


class HttpClient:
    """One server. Its methods run on one event loop; connections are opened when first needed."""

    def __init__(
        self, url: str, headers: Mapping[str, str] | None = None, *, timeout_s: float = 600.0, busy_s: float = 60.0
    ) -> None:
        """timeout_s: a server that says nothing for so long is given up. busy_s: for so long a request is tried again
        with a server that says it is busy. Raises ValueError for a URL or a time that is none."""
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"a server's URL begins with http:// or https://, not {url!r}")
        if not timeout_s > 0:
            raise ValueError(f"a server is given more than 0 seconds, not {timeout_s!r}")
        self.url = url.rstrip("/")
        self._headers = dict(headers or {})
        self._timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, 10.0))
        self._busy_s = busy_s
        self._client: httpx.AsyncClient | None = None
        self._pid = 0
        """Of the process whose connections these are."""

    def _open(self) -> httpx.AsyncClient:
        if self._client is None or self._pid != os.getpid():  # a forked process must not write to its parent's sockets
            connections = Connections(self.url)
            self._client = httpx.AsyncClient(headers=self._headers, timeout=self._timeout, transport=connections)
            self._pid = os.getpid()
        return self._client

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None and self._pid == os.getpid():
            await client.aclose()

    async def get(self, path: str) -> Any:
        return _json(await self._send("GET", path, None, {}), self.url + path)

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Any:
        """The answer's JSON. Raises Refused, Unreachable, BackendError."""
        return _json(await self._send("POST", path, body, headers or {}), self.url + path)

    async def post_text(self, path: str) -> str:
        return (await self._send("POST", path, None, {})).text

    async def events(
        self, path: str, body: Any, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[tuple[str, Any]]:
        """The events of a stream: (its name or "", its data), up to `[DONE]` or the end. Leaving early ends the
        request. Raises as `post`, and Unreachable for a stream that breaks off."""
        pauses = _Pauses(self._busy_s)
        while True:
            try:
                async with self._open().stream("POST", self.url + path, json=body, headers=headers or {}) as response:
                    if response.status_code in _BUSY and (pause := pauses.after(response)) is not None:
                        await asyncio.sleep(pause)
                        continue
                    if response.status_code != 200:
                        await response.aread()
                        raise _refused(response, self.url + path)
                    async with aclosing(_events(response)) as events:
                        async for event in events:
                            yield event
                    return
            except httpx.HTTPError as error:
                raise _unreachable(error, self.url) from error

    async def _send(self, method: str, path: str, body: Any, headers: Mapping[str, str]) -> httpx.Response:
        pauses = _Pauses(self._busy_s)
        while True:
            try:
                response = await self._open().request(
                    method,
                    self.url + path,
                    content=None if body is None else json.dumps(body),
                    headers=_typed(headers, body),
                )
            except httpx.HTTPError as error:
                raise _unreachable(error, self.url) from error
            if response.status_code in _BUSY and (pause := pauses.after(response)) is not None:
                await asyncio.sleep(pause)
                continue
            if response.status_code >= 300:
                raise _refused(response, self.url + path)
            return response


def _typed(headers: Mapping[str, str], body: Any) -> dict[str, str]:
    return dict(headers) if body is None else {"content-type": "application/json", **headers}


class _Pauses:
    """How long to leave a busy server alone, as long as there is patience left."""

    def __init__(self, patience_s: float) -> None:
        self._left_s = patience_s
        self._next_s = 0.5

    def after(self, response: httpx.Response) -> float | None:
        try:
            pause = float(response.headers.get("retry-after", self._next_s))
        except ValueError:
            pause = self._next_s
        pause = min(max(pause, 0.05), _MAX_WAIT_S)
        self._next_s *= 2
        self._left_s -= pause
        return pause if self._left_s >= 0 else None


async def _events(response: httpx.Response) -> AsyncGenerator[tuple[str, Any]]:
    name = ""
    async for line in response.aiter_lines():
        if line.startswith("event:"):
            name = line[6:].strip()
        elif line.startswith("data:"):
            data = line[5:].strip()
            if data == "[DONE]":
                return
            try:
                yield name, json.loads(data)
            except ValueError:
                raise BackendError(f"the server sent an event that is not JSON: {data[:200]!r}") from None
            name = ""


def _json(response: httpx.Response, url: str) -> Any:
    try:
        return response.json()
    except ValueError:
        raise BackendError(f"{url} answered with something that is not JSON: {response.text[:200]!r}") from None


def _unreachable(error: httpx.HTTPError, url: str) -> BackendError:
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return Unreachable(f"the server at {url} cannot be reached: {error or 'no answer'}")
    if isinstance(error, httpx.TimeoutException):
        return Unreachable(f"the server at {url} has said nothing for too long")
    return Unreachable(f"the server at {url} broke off: {error or type(error).__name__}")


def _refused(response: httpx.Response, url: str) -> BackendError:
    reason = message_of(response.text) or response.reason_phrase
    kind = Refused if 400 <= response.status_code < 500 and response.status_code not in (408, 429) else BackendError
    return kind(f"{url} answered {response.status_code}: {reason}")


def message_of(text: str) -> str:
    """What an error's body says, in the forms that servers have."""
    try:
        body = json.loads(text)
    except ValueError:
        return text.strip()[:500]
    for key in ("error", "message", "detail"):
        if isinstance(body, dict) and key in body:
            body = body[key]
    return body if isinstance(body, str) else json.dumps(body)[:500]


_REFUSALS: Final = ("BadRequestError", "NotFoundError", "invalid_request_error", "not_found_error", "permission_error")


def given_up(error: Any) -> BackendError:
    """What a stream's event says with `error`: in place of a status, which the stream had before."""
    said: Mapping[str, Any] = error if isinstance(error, Mapping) else {}
    code, reason = said.get("code"), said.get("message") or error
    if said.get("type") in _REFUSALS or (isinstance(code, int) and 400 <= code < 500 and code not in _BUSY):
        return Refused(f"the server refused the request: {reason}")
    return BackendError(f"the server gave the request up: {reason}")
