"""HTTP as the handlers see it: a request with its body, an answer or a stream, errors in OpenAI's shape. Plain ASGI.

One rule about lifetimes lives here: `run_while_connected` cancels a handler when its client goes away, streaming or
not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec
from treeline_wire import headers as wire_headers
from treeline_wire.openai_errors import error_body

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Header = tuple[bytes, bytes]
T = TypeVar("T")

MAX_BODY_BYTES = 32 << 20
_EDGE, _DESTINATION = wire_headers.EDGE.encode(), wire_headers.DESTINATION.encode()

encode_json = msgspec.json.Encoder().encode


class ApiError(Exception):
    """An answer that is an error, in OpenAI's shape."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Iterable[Header] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(message, type, param, code)
        self.headers = tuple(headers)


class ClientGone(Exception):
    """The client closed its connection before it had its answer."""


@dataclass(frozen=True)
class Response:
    body: bytes
    status: int = 200
    content_type: bytes = b"application/json"
    headers: tuple[Header, ...] = ()

    async def send(self, send: Send) -> None:
        headers = [
            (b"content-type", self.content_type),
            (b"content-length", b"%d" % len(self.body)),
            *self.headers,
        ]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


def json_response(value: Any, status: int = 200, headers: Iterable[Header] = ()) -> Response:
    return Response(encode_json(value), status, headers=tuple(headers))


def error_response(error: ApiError) -> Response:
    return json_response(error.body, error.status, error.headers)


@dataclass
class Request:
    """One HTTP request. `body` is read completely before the handler runs."""

    scope: Scope
    receive: Receive
    send: Send
    body: bytes = b""
    path_tail: str = ""
    """What follows the route's prefix, for routes that end in a parameter."""
    query: dict[str, str] = field(default_factory=dict)
    streaming: bool = False
    """Response headers have been sent."""

    @property
    def path(self) -> str:
        path: str = self.scope["path"]
        return path

    def header(self, name: bytes) -> bytes | None:
        found: bytes | None = next((value for key, value in self.scope["headers"] if key == name), None)
        return found

    @property
    def unpicked(self) -> bool:
        """It came through our edge, and no picker has said where it belongs: the edge fails open."""
        return self.header(_EDGE) is not None and self.header(_DESTINATION) is None

    def json(self) -> dict[str, Any]:
        """The body as a JSON object. Raises ApiError 400."""
        try:
            body = msgspec.json.decode(self.body or b"{}")
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ApiError(400, f"The body is not valid JSON: {error}") from None
        if not isinstance(body, dict):
            raise ApiError(400, "The body must be a JSON object")
        return body

    async def read_body(self) -> None:
        """Raises ApiError 413 beyond `MAX_BODY_BYTES`, ClientGone when the client leaves first."""
        parts, size = list[bytes](), 0
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > MAX_BODY_BYTES:
                raise ApiError(
                    413, f"The body is larger than {MAX_BODY_BYTES} bytes", code="request_too_large"
                )
            if not message.get("more_body"):
                break
        self.body = b"".join(parts)
        self.query = dict(
            parse_qsl(self.scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
        )

    async def start_events(self, headers: Iterable[Header] = ()) -> None:
        """Begins a server-sent event stream."""
        self.streaming = True
        start = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            *headers,
        ]
        await self.send({"type": "http.response.start", "status": 200, "headers": start})

    async def send_events(self, frames: bytes) -> None:
        await self.send({"type": "http.response.body", "body": frames, "more_body": True})

    async def end_events(self, frames: bytes) -> None:
        await self.send({"type": "http.response.body", "body": frames, "more_body": False})


def event(value: Any) -> bytes:
    """One server-sent event; the blank line ends it."""
    return b"data: " + encode_json(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` only as long as the client is there: its leaving cancels `work`, and raises ClientGone once that
    has ended. The body must have been read: then the server's next message can only be the disconnect.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
