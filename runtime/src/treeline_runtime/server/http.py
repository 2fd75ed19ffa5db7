"""HTTP as the handlers see it: requests that end when their client goes, answers, streams, errors in OpenAI's shape.

One rule about lifetimes lives here: `run_while_connected` cancels a handler when its client goes away, streaming or
not.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl

import msgspec
from treeline_wire import headers as wire_headers
from treeline_wire.json_values import MAX_SLOW, slow_numbers
from treeline_wire.openai_errors import error_body

if TYPE_CHECKING:
    from treeline_runtime.server.limits import Reservation
    from treeline_runtime.server.tracing import RequestSpan


Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Header = tuple[bytes, bytes]
T = TypeVar("T")

_EDGE, _DESTINATION = wire_headers.EDGE.encode(), wire_headers.DESTINATION.encode()
_IGNORED = wire_headers.IGNORED.encode()
_CLIENT, _ISOLATION = wire_headers.CLIENT.encode(), wire_headers.ISOLATION.encode()

_SEND_BYTES = 256 << 10
"""Of one piece of an answer: the connection's buffer is looked at in between."""

_PAIR = re.compile(rb"\\\\|\\u[dD][89abAB]..\\u[dD][c-fC-F]..")
"""Half of which may be no half; and backslashes that begin no escape."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_NOT_A_NUMBER = re.compile(rb"[\[:,]\s*-?(?:NaN|Infinity)\b")

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


@dataclass(frozen=True)
class ErrorShape:
    """How an API writes its errors."""

    body: Callable[[ApiError], Any]
    """As an answer, which becomes JSON."""
    event: Callable[[ApiError], bytes]
    """As the last event of a stream that fails."""


OPENAI_ERRORS = ErrorShape(lambda error: error.body, lambda error: event(error.body))


class ClientGone(Exception):
    """The client closed its connection before it had its answer."""


@dataclass(frozen=True)
class Response:
    body: bytes | Sequence[bytes]
    """In pieces where it is large: each is sent for itself, when the one before has left."""
    status: int = 200
    content_type: bytes = b"application/json"
    headers: tuple[Header, ...] = ()

    async def send(self, send: Send, more: Iterable[Header] = ()) -> None:
        pieces = [self.body] if isinstance(self.body, bytes) else self.body
        headers = [
            (b"content-type", self.content_type),
            (b"content-length", b"%d" % sum(map(len, pieces))),
            *self.headers,
            *more,
        ]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        for piece in in_pieces(pieces):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})


def in_pieces(parts: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in pieces of at most `_SEND_BYTES`, small parts joined."""
    small, size = list[bytes](), 0
    for part in parts:
        if small and size + len(part) > _SEND_BYTES:
            yield b"".join(small)
            small, size = [], 0
        if len(part) > _SEND_BYTES:
            for start in range(0, len(part), _SEND_BYTES):
                yield part[start : start + _SEND_BYTES]
        elif part:
            small.append(part)
            size += len(part)
    if small:
        yield b"".join(small)


def json_response(value: Any, status: int = 200, headers: Iterable[Header] = ()) -> Response:
    return Response(encode_json(value), status, headers=tuple(headers))


def error_response(error: ApiError, shape: ErrorShape = OPENAI_ERRORS) -> Response:
    return json_response(shape.body(error), error.status, error.headers)


@dataclass
class Request:
    """One HTTP request. Its body is read completely before the handler runs."""

    scope: Scope
    receive: Receive
    send: Send
    parts: list[bytes] = field(default_factory=list)
    """The body, in pieces as it came: a large one is never put together here."""
    size: int = 0
    """Of the body in bytes."""
    reservation: Reservation | None = None
    """What the body holds of the server's budget; whoever takes the body takes this too."""
    query: dict[str, str] = field(default_factory=dict)
    streaming: bool = False
    """Response headers have been sent."""
    errors: ErrorShape = OPENAI_ERRORS
    """Of the API that it speaks."""
    span: RequestSpan | None = None
    """What is recorded of it; None: nothing."""
    ignored: tuple[str, ...] = ()
    """What it says for nothing: the answer's headers name it."""

    @property
    def method(self) -> str:
        method: str = self.scope["method"]
        return method

    @property
    def path(self) -> str:
        path: str = self.scope["path"]
        return path

    @property
    def answer_headers(self) -> list[Header]:
        """Of its answer, whatever that is."""
        return [(_IGNORED, ", ".join(self.ignored).encode())] if self.ignored else []

    def path_parameter(self, name: str) -> str:
        """What stands in the path where the route has a parameter."""
        value: str = self.scope["path_params"][name]
        return value

    def header(self, name: bytes) -> bytes | None:
        found: bytes | None = next((value for key, value in self.scope["headers"] if key == name), None)
        return found

    @property
    def bypassed_picker(self) -> bool:
        """It came through our edge, and no picker has said where it belongs: the edge fails open."""
        return self.header(_EDGE) is not None and self.header(_DESTINATION) is None

    @property
    def client(self) -> str | None:
        """Who asks, and takes turns with others; None where the edge has not said.

        The edge sets this header and that of the isolation, and removes those of callers. Who reaches this port past
        the edge (the NetworkPolicy lets nobody) can name any client, as it can send any prompt: the header separates,
        it proves nothing.
        """
        client = self.header(_CLIENT)
        return client.decode("latin-1") if client else None

    @property
    def tenant(self) -> str | None:
        """The client whose cache the request uses, and nobody else's; None is the common one."""
        return self.client if self.header(_ISOLATION) == wire_headers.PER_KEY.encode() else None

    @property
    def shares_cache(self) -> bool:
        """Clients that do not know each other share the cache: what was cached of a prompt tells of the others'."""
        return self.header(_ISOLATION) == wire_headers.SHARED.encode()

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    def json(self) -> dict[str, Any]:
        """The body, of which nobody reads much, as a JSON object. Raises ApiError 400."""
        if slow_numbers(self.body) > MAX_SLOW:
            raise ApiError(400, "The body has too many long numbers")
        return json_object(self.body)

    async def read_body(self, limit: int, reservation: Reservation) -> None:
        """Reads all of it into `parts`, for as long as `reservation` can grow with them.

        Raises ApiError 413 beyond `limit`, 415 for a body that is compressed, ClientGone when the client leaves first,
        what the reservation raises. A body that is announced as too large is not waited for.
        """
        self.reservation = reservation
        if (coding := self.header(b"content-encoding") or b"identity").lower() != b"identity":
            raise ApiError(
                415,
                f"Bodies of Content-Encoding {coding.decode('latin-1')[:40]!r} are not read: send JSON as it is",
                code="unsupported_content_encoding",
                headers=((b"accept-encoding", b"identity"),),
            )
        announced = _content_length(self)
        self._check_size(announced, limit)
        reservation.check(announced)
        self.query = dict(parse_qsl(self.scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True))
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            self._check_size(self.size + len(part), limit)
            reservation.grow(len(part))
            self.size += len(part)
            self.parts.append(part)
            if not message.get("more_body"):
                return

    def hand_over(self) -> tuple[list[bytes], Reservation]:
        """The body and its room, for somebody else to release. Afterwards this has neither."""
        parts, room = self.parts, self.reservation
        assert room is not None, "the body has been read"
        self.parts, self.reservation = [], None
        return parts, room

    def _check_size(self, size: int, limit: int) -> None:
        if size > limit:
            raise ApiError(413, f"The body is larger than {limit} bytes", code="request_too_large")

    async def start_events(self, headers: Iterable[Header] = ()) -> None:
        """Begins a server-sent event stream."""
        self.streaming = True
        start = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            *headers,
            *self.answer_headers,
        ]
        await self.send({"type": "http.response.start", "status": 200, "headers": start})

    async def send_events(self, frames: bytes) -> None:
        await self.send({"type": "http.response.body", "body": frames, "more_body": True})

    async def end_events(self, frames: bytes) -> None:
        await self.send({"type": "http.response.body", "body": frames, "more_body": False})


def json_object(body: bytes) -> dict[str, Any]:
    """Raises ApiError 400."""
    try:
        value = msgspec.json.decode(body or b"{}")
    except RecursionError:
        raise ApiError(400, "The body is nested too deeply") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise ApiError(400, f"The body is not valid JSON: {why_not_json(body, error)}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "The body must be a JSON object")
    return value


def why_not_json(text: bytes, error: Exception) -> str:
    """What is wrong with it, in words where `error` has none for what clients really send."""
    if _SURROGATE.search(_PAIR.sub(b"", text)):
        return "it contains half of a surrogate pair (as \\ud800), which is no text"
    if _NOT_A_NUMBER.search(text):
        return "NaN and Infinity are no numbers there; leave such a member out"
    return str(error)


def named_event(name: str, value: Any) -> bytes:
    """The same with a name."""
    return b"event: " + name.encode() + b"\n" + event(value)


def _content_length(request: Request) -> int:
    """What the client announced; 0 where it did not. The server has checked that it is a number."""
    value = request.header(b"content-length") or b"0"
    return int(value) if value.isdigit() and len(value) < 20 else 0


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
