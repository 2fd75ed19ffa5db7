"""HTTP requests to servers: typed errors, retries while they are busy, event streams."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, Final
from urllib.parse import urlsplit

from treeline_wire.sse import EventStream

from treeline_lang.backends.connections import BrokeOff, CannotConnect, Connections, Response, authorization
from treeline_lang.errors import BackendError, Refused, Unreachable

_BUSY: Final = (429, 503, 529)
"""529 is Anthropic's status for "overloaded"."""
_MAX_WAIT_S: Final = 30.0
"""The longest pause before a retry; servers ask for one by Retry-After."""
MAX_ANSWER_BYTES: Final = 256 << 20
"""The largest answer, or event of a stream, in bytes: a server might send without end."""


class HttpClient:
    """A client of one server. Its methods run on one event loop; connections open when first needed."""

    def __init__(
        self, url: str, headers: Mapping[str, str] | None = None, *, timeout_s: float = 600.0, busy_s: float = 60.0
    ) -> None:
        """timeout_s: the longest silence of the server. busy_s: how long requests to a busy server are retried. Raises
        ValueError for a malformed URL, header or timeout."""
        user = _user_of(url)
        self.url = _USER.sub("//", url.rstrip("/"))
        """The URL for requests and errors, without a user name and password."""
        for name, value in (headers or {}).items():
            if not _HEADER.fullmatch(value):  # the value is not shown: it may be a key
                raise ValueError(f"the key for the header {name} is not one line of visible ASCII characters")
        if not timeout_s > 0:
            raise ValueError(f"a timeout is above 0 seconds, not {timeout_s!r}")
        self._headers = {**(headers or {}), **user}
        self._timeout_s = timeout_s
        self._busy_s = busy_s
        self._connections: Connections | None = None
        self._pid = 0
        """The process whose connections these are."""

    def _open(self) -> Connections:
        if self._connections is None or self._pid != os.getpid():  # a fork must not write to its parent's sockets
            self._connections = Connections(self.url, self._headers, self._timeout_s)
            self._pid = os.getpid()
        return self._connections

    async def close(self) -> None:
        connections, self._connections = self._connections, None
        if connections is not None and self._pid == os.getpid():
            await connections.close()

    async def get(self, path: str) -> Any:
        return _json(await self._send("GET", path, None, {}), self.url + path)

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Any:
        """The answer's JSON. Raises Refused, Unreachable, BackendError."""
        return _json(await self._send("POST", path, body, headers or {}), self.url + path)

    async def post_text(self, path: str) -> str:
        return (await self._send("POST", path, None, {})).decode(errors="replace")

    async def events(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> AsyncGenerator[Any]:
        """The data of a stream's events, up to `[DONE]` or the end. Leaving early ends the request. Raises as `post`,
        and Unreachable for a stream that breaks off."""
        async with (
            self._answer("POST", path, body, headers or {}) as response,
            aclosing(_events(response)) as events,
        ):
            async for event in events:
                yield event

    async def _send(self, method: str, path: str, body: Any, headers: Mapping[str, str]) -> bytes:
        async with self._answer(method, path, body, headers) as response:
            return await _whole(response, self.url + path)

    @asynccontextmanager
    async def _answer(self, method: str, path: str, body: Any, headers: Mapping[str, str]) -> AsyncGenerator[Response]:
        """A context manager with a successful answer; retries while the server is busy. Raises as `post`, also for
        errors inside it."""
        pauses = _Pauses(self._busy_s)
        content = b"" if body is None else json.dumps(body).encode()
        typed = headers if body is None else {"content-type": "application/json", **headers}
        while True:
            try:
                async with self._open().request(method, path, typed, content) as response:
                    if response.status < 300:
                        yield response
                        return
                    refusal = await _whole(response, self.url + path)
            except _FAILURES as error:
                raise _unreachable(error, self.url) from error
            pause = pauses.after(response) if response.status in _BUSY else None
            if pause is None:
                raise _refused(response, refusal, self.url + path)
            await asyncio.sleep(pause)


_USER: Final = re.compile(r"//[^/?#]*@")
_HEADER: Final = re.compile(r"[!-~]([ -~]*[!-~])?")


def _user_of(url: str) -> dict[str, str]:
    """The header for a URL's user and password. Raises ValueError for a URL that is not a server's."""
    shown = _USER.sub("//", url)
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"a server's URL begins with http:// or https://, not {shown!r}")
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname and parts.hostname.encode("idna")) and parts.port != 0
    except ValueError as error:
        raise ValueError(f"{shown!r} is not a server's URL: {_USER.sub('//', str(error))}") from None
    if not has_host:
        raise ValueError(f"{shown!r} is not a server's URL: it has no host")
    return authorization("authorization", parts)


async def _whole(response: Response, url: str) -> bytes:
    body = bytearray()
    async for part in response.parts():
        body += part
        if len(body) > MAX_ANSWER_BYTES:
            raise BackendError(f"{url} answered with more than {MAX_ANSWER_BYTES >> 20} MiB")
    return bytes(body)


class _Pauses:
    """The pauses between retries, while patience lasts."""

    def __init__(self, patience_s: float) -> None:
        self._left_s = patience_s
        self._next_s = 0.5

    def after(self, response: Response) -> float | None:
        try:
            pause = float(response.headers.get("retry-after", self._next_s))
        except ValueError:
            pause = self._next_s
        if math.isnan(pause):
            pause = self._next_s
        pause = min(max(pause, 0.05), _MAX_WAIT_S)
        self._next_s *= 2
        self._left_s -= pause
        return pause if self._left_s >= 0 else None


async def _events(response: Response) -> AsyncGenerator[Any]:
    stream = EventStream(MAX_ANSWER_BYTES)
    async with aclosing(response.parts()) as chunks:
        async for chunk in chunks:
            for data in _taken(stream, chunk):
                if data == "[DONE]":
                    return
                yield _read_event(data)
    for data in stream.end():
        if data != "[DONE]":
            yield _read_event(data)


def _taken(stream: EventStream, chunk: bytes) -> list[str]:
    try:
        return stream.take(chunk)
    except ValueError as error:
        raise BackendError(f"the server sent {error}") from None


def _read_event(data: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise BackendError(f"the server sent an event that is not JSON: {data[:200]!r}") from None


def _json(body: bytes, url: str) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        shown = body[:200].decode(errors="replace")
        raise BackendError(f"{url} answered with something that is not JSON: {shown!r}") from None


_FAILURES: Final = (CannotConnect, BrokeOff, TimeoutError)


def _unreachable(error: Exception, url: str) -> BackendError:
    if isinstance(error, CannotConnect):
        return Unreachable(f"the server at {url} cannot be reached: {error}")
    if isinstance(error, TimeoutError):
        return Unreachable(f"the server at {url} sent nothing for too long")
    return Unreachable(f"the server at {url} broke off: {error}")


def _refused(response: Response, body: bytes, url: str) -> BackendError:
    reason = message_of(body.decode(errors="replace")) or response.reason
    kind = Refused if 400 <= response.status < 500 and response.status not in (408, 429) else BackendError
    return kind(f"{url} answered {response.status}: {reason}")


def message_of(text: str) -> str:
    """The error message in a body, in the formats of various servers."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return text.strip()[:500]
    for key in ("error", "message", "detail"):
        if isinstance(body, dict) and key in body:
            body = body[key]
    return (body if isinstance(body, str) else json.dumps(body))[:2000]


@contextmanager
def read(answer: Any, form: str) -> Iterator[None]:
    """Wraps the reading of an answer or event: a malformed one is the server's error, not a bug here."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError):
        raise BackendError(f"the server's answer is not {form}: {str(answer)[:200]}") from None


_REFUSALS: Final = ("BadRequestError", "NotFoundError", "invalid_request_error", "not_found_error", "permission_error")


def given_up(error: Any) -> BackendError:
    """The error of a stream's `error` event, which comes after the status was sent."""
    said: Mapping[str, Any] = error if isinstance(error, Mapping) else {}
    code, reason = said.get("code"), said.get("message") or error
    if said.get("type") in _REFUSALS or (isinstance(code, int) and 400 <= code < 500 and code not in _BUSY):
        return Refused(f"the server refused the request: {reason}")
    return BackendError(f"the server aborted the request: {reason}")
