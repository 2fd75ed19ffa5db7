"""HTTP for endpoints: requests with bounded bodies, answers in pieces, server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from treeline_wire import headers as wire_headers
from treeline_wire.json_values import MAX_SLOW, slow_numbers

from treeline_runtime.server.errors import ApiError, ClientGone, Header, wrong
from treeline_runtime.server.fields import json_object
from treeline_runtime.server.limits import Limits, Reservation
from treeline_runtime.server.pacing import encode_json

if TYPE_CHECKING:
    from treeline_runtime.media.reading import Held
    from treeline_runtime.server.tracing import RequestSpan
    from treeline_runtime.tokenizer_manager import InflightRequest

_SEND_BYTES = 256 << 10
"""The largest piece of an answer; the connection's buffer is checked in between."""


class Answer(Response):
    """An answer, sent in pieces if large."""

    def __init__(
        self,
        body: bytes | Sequence[bytes],
        status: int = 200,
        headers: Iterable[Header] = (),
        content_type: bytes = b"application/json",
    ) -> None:
        self._pieces = [body] if isinstance(body, bytes) else body
        self.status_code = status
        self.background = None
        length = b"%d" % sum(map(len, self._pieces))
        self.raw_headers = [(b"content-type", content_type), (b"content-length", length), *headers]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        *most, last = list(in_pieces(self._pieces)) or [b""]
        for piece in most:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": last})


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


def json_answer(value: Any, status: int = 200, headers: Iterable[Header] = ()) -> Answer:
    return Answer(encode_json(value), status, headers)


class ApiRequest(Request):
    """A request whose body is read completely before the endpoint runs."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        super().__init__(scope, receive)
        self.came_at = time.monotonic()
        self.parts: list[bytes] = []
        """The body, in pieces as it came: a large one is never put together here."""
        self.size = 0
        self.reservation: Reservation | None = None
        """The body's share of the server's budget; code that takes over the body takes over this too."""
        self.inflight: InflightRequest | None = None
        """The request's generations, once they have been started."""
        self.left = False
        self.streaming = False
        """The first event of a stream has been made."""
        self.span: RequestSpan | None = None
        """The trace span that records it; None: it is not traced."""
        self.ignored: tuple[str, ...] = ()
        """Fields without effect: a header of the answer names them."""
        self.on_end: Callable[[], object] | None = None
        self.held: Held | None = None
        """The outputs of its images."""
        self._watcher: asyncio.Task[None] | None = None

    @property
    def path(self) -> str:
        path: str = self.scope["path"]
        return path

    @property
    def client(self) -> str | None:  # type: ignore[override]
        """The client, for taking turns; None if the edge did not name it.

        The edge sets this header and that of isolation, and removes callers'. Anyone who reaches this port past the
        edge (which the NetworkPolicy prevents) can name any client: the header separates clients, it does not
        authenticate them.
        """
        return self.headers.get(wire_headers.CLIENT) or None

    @property
    def tenant(self) -> str | None:
        """The client whose cache the request uses; None is the common one."""
        return self.client if self.headers.get(wire_headers.ISOLATION) == wire_headers.PER_KEY else None

    @property
    def shares_cache(self) -> bool:
        """Clients that do not know each other share the cache, so cached counts would reveal other clients' prompts."""
        return self.headers.get(wire_headers.ISOLATION) == wire_headers.SHARED

    @property
    def picked(self) -> bool:
        """It comes through our edge, where the picker alone names a data-parallel rank."""
        return wire_headers.EDGE in self.headers

    @property
    def pages_from(self) -> str | None:
        """Where pages of the prompt may be. The edge removes callers' copies of the header."""
        return self.headers.get(wire_headers.PAGES_FROM)

    def rank(self, limits: Limits, of_body: int | None) -> int | None:
        """The data-parallel rank that its header names, or its body. Raises ApiError 400."""
        named = self.headers.get(wire_headers.RANK)
        if named is None:
            return of_body
        rank = limits.rank_in(named, wire_headers.RANK)
        if of_body not in (None, rank):
            raise wrong(
                wire_headers.RANK,
                f"The header {wire_headers.RANK} names rank {rank}, and the body names rank {of_body}: leave one out",
                code="invalid_value",
            )
        return rank

    @property
    def content(self) -> bytes:
        return b"".join(self.parts)

    def json_object(self) -> dict[str, Any]:
        """The body as a JSON object, for endpoints without a prompt. Raises ApiError 400."""
        if slow_numbers(self.content) > MAX_SLOW:
            raise ApiError(400, "The body has too many long numbers")
        return json_object(self.content)

    async def read_body(self, limit: int, reservation: Reservation) -> None:
        """Reads it all into `parts`, as long as `reservation` can grow.

        Raises ApiError 413 beyond `limit`, 415 for a body that is compressed, ClientGone when the client leaves first,
        what the reservation raises. A body that is announced as too large is not waited for.
        """
        self.reservation = reservation
        if (coding := self.headers.get("content-encoding", "identity")).lower() != "identity":
            raise ApiError(
                415,
                f"Bodies of Content-Encoding {coding[:40]!r} are not read: send JSON as it is",
                code="unsupported_content_encoding",
                headers=((b"accept-encoding", b"identity"),),
            )
        announced = self.headers.get("content-length", "0")
        length = int(announced) if announced.isdecimal() and len(announced) < 20 else 0
        _check_size(length, limit)
        reservation.check(length)
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            _check_size(self.size + len(part), limit)
            reservation.grow(len(part))
            self.size += len(part)
            self.parts.append(part)
            if not message.get("more_body"):
                return

    def hand_over(self) -> tuple[list[bytes], Reservation]:
        """Hands the body and its reservation to another owner, who releases it."""
        parts, room = self.parts, self.reservation
        assert room is not None, "the body has been read"
        self.parts, self.reservation = [], None
        return parts, room

    def watch(self) -> None:
        """From now on its task is cancelled when the client disconnects, which is no error (`app.Observed`). The body
        must have been read: the server's next message can only be the disconnect.
        """
        task = asyncio.current_task()
        assert task is not None

        async def watching() -> None:
            while (await self.receive())["type"] != "http.disconnect":
                pass
            self.left = True
            task.cancel()

        self._watcher = asyncio.create_task(watching())

    def end(self) -> None:
        """Called when the answer has been sent, or none will be. Ends the generations and frees the request's
        resources.

        The server may keep the request until its connection's next one.
        """
        if self._watcher is not None:
            self._watcher.cancel()
        inflight, self.inflight, self.parts = self.inflight, None, []
        if self.reservation is not None:
            self.reservation.release()
        if self.on_end is not None:
            self.on_end()
        if self.span is not None:
            self.span.end(streamed=self.streaming)
        if inflight is not None:
            inflight.close()
        if self.held is not None:
            self.held.release()


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise ApiError(413, f"The body is larger than {limit} bytes", code="request_too_large")


class EventStream(StreamingResponse):
    """Server-sent events. `ApiRequest.watch` notices disconnects."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.stream_response(send)


def event(value: Any) -> bytes:
    """A server-sent event, ended by a blank line."""
    return b"data: " + encode_json(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    return b"event: " + name.encode() + b"\n" + event(value)


def error_event(error: ApiError) -> bytes:
    return event(error.body)


DONE = b"data: [DONE]\n\n"
