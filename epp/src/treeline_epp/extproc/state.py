"""One ext_proc stream as a state machine, and the bound of its body: messages of the proxy in, replies out, no I/O.

Two rules. All transitions live in the two tables below. This module never decides where a request goes: when it knows
enough it hands out a `RouteRequest` and waits for `ExtProcState.answer` or `ExtProcState.refuse`.

Theory of operation. A proxy sends request headers, body and trailers, then response headers, body and trailers, and
waits for an answer to each; what may be left unanswered, and where a mutation takes effect, depends on the body mode:

=======================  ================================================  ==========================================
request body mode        decided at                                        destination goes on
=======================  ================================================  ==========================================
`NONE`, `STREAMED`   the headers (body replies cannot change headers)  the headers reply
`BUFFERED`             the one body message                              the body reply; headers are answered at once
`FULL_DUPLEX`          the end of the body, or the trailers              the headers reply, withheld until then
any, no body             the headers                                       the headers reply
any, no headers          the body or its first chunk, else the trailers    the reply to that
=======================  ================================================  ==========================================

In full duplex the collected body is then returned in chunks that stay below the proxy's limit. A proxy may
deliver the end of a long body twice: whatever follows the first end of stream is ignored. A stream may start at the
response (a reply made by the proxy itself). Which messages come is the proxy's configuration, of which it tells the
body modes alone: headers of either half may be left out, or come after the body, and trailers may be made up after a
body that has ended. Headers and trailers come once.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from treeline_epp.requests.body import CHUNK_BYTES, Body, Buffer, Immediate, RouteRequest, path_of
from treeline_epp.requests.refusals import Refusal, body_too_large
from treeline_epp.requests.subset import narrowed

WHOLE_BYTES = 256 * 1024
"""Bodies up to this size are handed out as bytes, larger ones as a `Body`, which is never joined."""


class BodyMode(enum.IntEnum):
    """The way in which a proxy sends a body; the values are those of Envoy's `ProcessingMode.BodySendMode`."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4
    GRPC = 5


class Kind(enum.Enum):
    """The kind of a message. Values are the field names of `ProcessingRequest` and `ProcessingResponse`."""

    REQUEST_HEADERS = "request_headers"
    REQUEST_BODY = "request_body"
    REQUEST_TRAILERS = "request_trailers"
    RESPONSE_HEADERS = "response_headers"
    RESPONSE_BODY = "response_body"
    RESPONSE_TRAILERS = "response_trailers"

    # By identity: the inherited one is Python code, and every message is looked up.
    __hash__ = object.__hash__


class RequestPhase(enum.Enum):
    """The phase of a stream's request half."""

    IDLE = "idle"
    COLLECTING = "collecting"
    DECIDING = "deciding"
    FORWARDING = "forwarding"
    DONE = "done"
    ABANDONED = "abandoned"
    """The response came before a decision was possible."""
    CLOSED = "closed"
    """An immediate response was sent, or an error was raised: later messages are ignored."""

    __hash__ = object.__hash__


class ResponsePhase(enum.Enum):
    """The phase of a stream's response half."""

    WAITING = "waiting"
    STREAMING = "streaming"
    DONE = "done"

    __hash__ = object.__hash__


_IDLE, _COLLECTING, _DECIDING = RequestPhase.IDLE, RequestPhase.COLLECTING, RequestPhase.DECIDING
_FORWARDING, _DONE, _ABANDONED = RequestPhase.FORWARDING, RequestPhase.DONE, RequestPhase.ABANDONED

REQUEST_TRANSITIONS: dict[RequestPhase, dict[Kind, RequestPhase]] = {
    _IDLE: {
        Kind.REQUEST_HEADERS: _COLLECTING,
        Kind.REQUEST_BODY: _COLLECTING,
        Kind.REQUEST_TRAILERS: _COLLECTING,
        Kind.RESPONSE_HEADERS: _ABANDONED,
    },
    _COLLECTING: {
        Kind.REQUEST_HEADERS: _COLLECTING,
        Kind.REQUEST_BODY: _COLLECTING,
        Kind.REQUEST_TRAILERS: _COLLECTING,
        Kind.RESPONSE_HEADERS: _ABANDONED,
    },
    _DECIDING: {},  # only answer() and refuse() lead on
    _FORWARDING: {
        Kind.REQUEST_HEADERS: _FORWARDING,
        Kind.REQUEST_BODY: _FORWARDING,
        Kind.REQUEST_TRAILERS: _DONE,
        Kind.RESPONSE_HEADERS: _FORWARDING,
    },
    _DONE: {
        Kind.REQUEST_HEADERS: _DONE,
        Kind.REQUEST_BODY: _DONE,
        Kind.REQUEST_TRAILERS: _DONE,
        Kind.RESPONSE_HEADERS: _DONE,
    },
    _ABANDONED: {Kind.REQUEST_BODY: _ABANDONED, Kind.REQUEST_TRAILERS: _DONE, Kind.RESPONSE_HEADERS: _ABANDONED},
}
"""The messages that are legal in each phase of the request, and the next phase. An end of stream leads on
further: from COLLECTING to DECIDING, from FORWARDING to DONE. The first message of the response, whatever its kind,
counts as RESPONSE_HEADERS here."""

RESPONSE_TRANSITIONS: dict[ResponsePhase, dict[Kind, ResponsePhase]] = {
    ResponsePhase.WAITING: {
        Kind.RESPONSE_HEADERS: ResponsePhase.STREAMING,
        Kind.RESPONSE_BODY: ResponsePhase.STREAMING,
        Kind.RESPONSE_TRAILERS: ResponsePhase.DONE,
    },
    ResponsePhase.STREAMING: {
        Kind.RESPONSE_HEADERS: ResponsePhase.STREAMING,
        Kind.RESPONSE_BODY: ResponsePhase.STREAMING,
        Kind.RESPONSE_TRAILERS: ResponsePhase.DONE,
    },
    ResponsePhase.DONE: {
        Kind.RESPONSE_HEADERS: ResponsePhase.DONE,
        Kind.RESPONSE_BODY: ResponsePhase.DONE,
        Kind.RESPONSE_TRAILERS: ResponsePhase.DONE,
    },
}
"""The same for the response. An end of stream leads to DONE."""


_OF_REQUEST = frozenset({Kind.REQUEST_HEADERS, Kind.REQUEST_BODY, Kind.REQUEST_TRAILERS})
_BODIES = frozenset({Kind.REQUEST_BODY, Kind.RESPONSE_BODY})
_DECIDED_AT_HEADERS = frozenset({BodyMode.NONE, BodyMode.STREAMED, BodyMode.GRPC})


class ExtProcError(Exception):
    """The proxy broke the protocol; `status` is the HTTP status of the answer.

    The stream is closed when this is raised. Any other exception from this module is a bug in it.
    """

    status = 500


class OutOfOrder(ExtProcError):
    """A message is not legal in this phase."""


class Message(msgspec.Struct, frozen=True, gc=False):
    """A message of the proxy.

    `headers` (lower-case names) on the two headers kinds, `data` on the two body kinds. `subset` is the set of
    endpoints (`ip:port` or `ip`) to which the proxy limits the choice; `None` when it does not. The subsets of all
    messages limit it together. `pool` is the pool that the proxy has chosen, if any. `served`, on response headers, is
    the `ip:port` that answered; `None` when the proxy does not say. `modes` are the body modes of request and
    response, where this message has them (a stream's first does). `observed`: the proxy only shows the message, goes
    on by itself, and takes no answer.
    """

    kind: Kind
    end_of_stream: bool = False
    headers: Mapping[str, str] = {}
    data: Buffer = b""
    subset: frozenset[str] | None = None
    pool: str | None = None
    served: str | None = None
    modes: tuple[BodyMode, BodyMode] | None = None
    observed: bool = False


class Reply(msgspec.Struct, frozen=True, gc=False):
    """An answer to a message of the same kind: "go on", plus what is set here.

    `destination` is the value for the destination header and for dynamic metadata. `chunk` is a body chunk in full
    duplex (`None`: the body stays unchanged), `end_of_stream` belongs to it. `body` replaces a buffered body.
    `content_length` is set if the proxy dropped the header, or the length has changed, and it is known. `served`
    goes to the client in a response header of conformance tests; `headers` are further response headers. `added` are
    request headers that are sent besides the destination; those with None are removed.
    """

    kind: Kind
    destination: str | None = None
    chunk: Buffer | None = None
    end_of_stream: bool = False
    body: bytes | Body | None = None
    content_length: int | None = None
    served: str | None = None
    headers: tuple[tuple[str, bytes], ...] = ()
    added: tuple[tuple[str, str | None], ...] = ()


Output = Reply | Immediate | RouteRequest


class ExtProcState:
    """The state of one ext_proc stream.

    Feed each message to `receive` and send the replies in order. When a `RouteRequest` is among the outputs (it
    is then the last), call `answer`, `refuse` or `respond` before the next message.

    `body_limit` is the largest request body in bytes; for a larger one the client gets 413.
    """

    def __init__(
        self,
        request_body: BodyMode = BodyMode.FULL_DUPLEX_STREAMED,
        response_body: BodyMode = BodyMode.FULL_DUPLEX_STREAMED,
        *,
        body_limit: int,
    ) -> None:
        self.request_phase = RequestPhase.IDLE
        self.response_phase = ResponsePhase.WAITING
        self._request_mode = request_body
        self._response_mode = response_body
        self._body_limit = body_limit
        self._headers: Mapping[str, str] = {}
        self._subset: frozenset[str] | None = None
        self._pool: str | None = None
        self._body = Body()
        self._has_body = False
        self._waiting = Kind.REQUEST_HEADERS
        self._seen: set[Kind] = set()  # headers and trailers
        self._destination: str | None = None
        self._ended = False  # the request's headers or body had end of stream
        self._trailers_pending = False

    @property
    def closed(self) -> bool:
        """Whether an immediate response was sent, or the protocol was broken."""
        return self.request_phase is RequestPhase.CLOSED

    @property
    def finished(self) -> bool:
        """Whether all answers are given: the stream may end, and the response goes on without us.

        A generation takes minutes after its headers. A picker without open streams breaks none when it exits.
        """
        answered = self.response_phase is not ResponsePhase.WAITING and self._response_mode is BodyMode.NONE
        return self.closed or (answered and self.request_phase in (_DONE, _ABANDONED))

    @property
    def timed(self) -> bool:
        """Whether the proxy's wait for the decision is limited by its configuration. It is, except in full duplex."""
        return self._request_mode is not BodyMode.FULL_DUPLEX_STREAMED

    def receive(self, message: Message) -> list[Output]:
        """Take the next message of the proxy; return the answers, or a request to route. Raises `OutOfOrder`."""
        if self.request_phase is RequestPhase.CLOSED:
            return []
        request, response = self.request_phase, self.response_phase
        self._advance(message.kind)
        if message.subset is not None:
            self._subset = narrowed(self._subset, message.subset)
        if message.pool is not None:
            self._pool = message.pool
        match message.kind:
            case Kind.REQUEST_HEADERS:
                return self._on_request_headers(request, message)
            case Kind.REQUEST_BODY:
                return self._on_request_body(request, message)
            case Kind.REQUEST_TRAILERS:
                return self._on_request_trailers(request)
            case _:
                if message.end_of_stream:
                    self.response_phase = ResponsePhase.DONE
                given_back = self._give_back() if self.request_phase is _ABANDONED and request is _COLLECTING else []
                return given_back + self._on_response(response, message)

    def answer(
        self, destination: str, body: bytes | Body | None = None, added: tuple[tuple[str, str | None], ...] = ()
    ) -> list[Output]:
        """Return the replies that the proxy waits for, with the chosen endpoint list (`ip:port,ip:port`).

        `body` replaces the request's, which the `RouteRequest` must have shown; `added` are request headers to send
        with it, or to remove (None).
        """
        if self.request_phase is not _DECIDING:
            raise RuntimeError(f"answer() without a RouteRequest: the stream is {self.request_phase.value}")
        self.request_phase = _DONE if self._ended or self._trailers_pending else _FORWARDING
        self._destination = destination
        collected, self._body = self._body, Body()  # a response may take minutes; the body is not kept that long
        if self._request_mode is BodyMode.FULL_DUPLEX_STREAMED and self._has_body:
            replies = self._duplex_answer(destination, collected if body is None else body)
        elif self._waiting is Kind.REQUEST_BODY:
            if self._request_mode in _DECIDED_AT_HEADERS:
                body = None  # headers that we did not see have been sent, with the length of the old body
            length = len(body) if body is not None and "content-length" in self._headers else None
            replies = [Reply(Kind.REQUEST_BODY, destination=destination, body=body, content_length=length)]
        else:
            replies = [Reply(self._waiting, destination=destination)]
        if self._trailers_pending and self._waiting is not Kind.REQUEST_TRAILERS:
            replies.append(Reply(Kind.REQUEST_TRAILERS))
        if not added:
            return replies
        chosen = (isinstance(reply, Reply) and reply.destination is not None for reply in replies)
        return [
            msgspec.structs.replace(reply, added=added) if goes_on else reply
            for reply, goes_on in zip(replies, chosen, strict=True)
        ]

    def _duplex_answer(self, destination: str, body: bytes | Body) -> list[Output]:
        """Return the headers with the destination and the body; without headers the first chunk has it."""
        pieces = (Body([body]) if isinstance(body, bytes) else body).pieces()
        chunks = _in_chunks(Kind.REQUEST_BODY, pieces, end_of_stream=not self._trailers_pending)
        if self._waiting is not Kind.REQUEST_HEADERS:
            return [msgspec.structs.replace(next(chunks), destination=destination), *chunks]
        length = None if self._trailers_pending else len(body)
        return [Reply(Kind.REQUEST_HEADERS, destination=destination, content_length=length), *chunks]

    def refuse(self, refusal: Refusal) -> list[Output]:
        """Return the refusal: the proxy tells the client why there is no endpoint."""
        body = refusal.body(path_of(self._headers))
        return self.respond(Immediate(refusal.status, body, refusal.headers(), f"treeline_{refusal.code}"))

    def respond(self, response: Immediate) -> list[Output]:
        """Return a response for the client. Legal in any phase; afterwards the stream is closed."""
        self._close()
        return [response]

    # --- transitions --------------------------------------------------------------------------------------------------

    def _advance(self, kind: Kind) -> None:
        """Move both halves along the tables."""
        request: RequestPhase | None = self.request_phase
        response: ResponsePhase | None = self.response_phase
        if kind in _OF_REQUEST:
            request = REQUEST_TRANSITIONS[self.request_phase].get(kind)
        else:
            response = RESPONSE_TRANSITIONS[self.response_phase].get(kind)
            if self.response_phase is ResponsePhase.WAITING:
                request = REQUEST_TRANSITIONS[self.request_phase].get(Kind.RESPONSE_HEADERS)
        if request is None or response is None or kind in self._seen:
            where = f"{self.request_phase.value}/{self.response_phase.value}"
            self._close()
            raise OutOfOrder(f"{kind.value} is not expected while the stream is {where}")
        if kind not in _BODIES:
            self._seen.add(kind)
        self.request_phase, self.response_phase = request, response

    def _close(self) -> None:
        self.request_phase = RequestPhase.CLOSED
        self._body = Body()

    def _decide(self, waiting: Kind, body: bytes | Body | None) -> list[Output]:
        self.request_phase = _DECIDING
        self._waiting = waiting
        return [RouteRequest(self._headers, body, self._subset, self._pool, self._response_mode is not BodyMode.NONE)]

    def _collected(self) -> bytes | Body:
        return self._body if len(self._body) > WHOLE_BYTES else self._body.joined()

    # --- one handler for each kind ------------------------------------------------------------------------------------

    def _on_request_headers(self, before: RequestPhase, message: Message) -> list[Output]:
        self._headers = message.headers
        if before is not _IDLE:  # after the body, or the beginning of one in full duplex
            return [] if before is _COLLECTING else [Reply(Kind.REQUEST_HEADERS, destination=self._destination)]
        self._ended = message.end_of_stream
        if message.end_of_stream:
            return self._decide(Kind.REQUEST_HEADERS, b"")
        if self._request_mode in _DECIDED_AT_HEADERS:
            return self._decide(Kind.REQUEST_HEADERS, None)
        if _announced_length(message.headers) > self._body_limit:
            return self.refuse(body_too_large(self._body_limit))
        if self._request_mode is BodyMode.FULL_DUPLEX_STREAMED:
            return []
        return [Reply(Kind.REQUEST_HEADERS)]

    def _on_request_body(self, before: RequestPhase, message: Message) -> list[Output]:
        duplex = self._request_mode is BodyMode.FULL_DUPLEX_STREAMED
        if before is not _COLLECTING and before is not _IDLE:
            return self._on_later_request_body(before, message)
        if len(self._body) + len(message.data) > self._body_limit:
            return self.refuse(body_too_large(self._body_limit))
        self._ended = message.end_of_stream
        self._has_body = True
        if not duplex:  # one message holds all of it or, partially buffered, as much as we are going to see
            whole = message.end_of_stream or self._request_mode is BodyMode.BUFFERED
            return self._decide(Kind.REQUEST_BODY, _at_once(message.data) if whole else None)
        self._body.add(message.data)
        return self._decide(self._first_waiting(), self._collected()) if message.end_of_stream else []

    def _on_later_request_body(self, before: RequestPhase, message: Message) -> list[Output]:
        """Handle a body after the decision, the end, or the response."""
        ended, self._ended = self._ended, self._ended or message.end_of_stream
        if message.end_of_stream and before is _FORWARDING:
            self.request_phase = _DONE
        if self._request_mode is not BodyMode.FULL_DUPLEX_STREAMED:
            return [Reply(Kind.REQUEST_BODY)]
        if before is _ABANDONED and Kind.REQUEST_HEADERS not in self._seen and not ended:
            return _echoed(message)  # the headers were sent without us, and the server that answered waits for the rest
        return []  # in full duplex a proxy expects nothing

    def _on_request_trailers(self, before: RequestPhase) -> list[Output]:
        if before is not _COLLECTING and before is not _IDLE:
            return [Reply(Kind.REQUEST_TRAILERS)]
        if self._request_mode is BodyMode.FULL_DUPLEX_STREAMED and before is _COLLECTING:
            self._trailers_pending = True
            return self._decide(self._first_waiting(), self._collected())
        # The headers were sent long ago, so only dynamic metadata can carry the destination now.
        self._ended = True
        return self._decide(Kind.REQUEST_TRAILERS, b"" if before is _COLLECTING else None)

    def _first_waiting(self) -> Kind:
        """Return the kind that the proxy has waited for the longest, in full duplex."""
        return Kind.REQUEST_HEADERS if Kind.REQUEST_HEADERS in self._seen else Kind.REQUEST_BODY

    def _give_back(self) -> list[Output]:
        """Return the kept part of a body whose headers were sent already: the response came before the body's end."""
        collected, self._body = self._body, Body()
        if self._request_mode is not BodyMode.FULL_DUPLEX_STREAMED or Kind.REQUEST_HEADERS in self._seen:
            return []
        return list(_in_chunks(Kind.REQUEST_BODY, collected.pieces(), end_of_stream=False))

    def _on_response(self, before: ResponsePhase, message: Message) -> list[Output]:
        if message.kind is not Kind.RESPONSE_BODY or self._response_mode is not BodyMode.FULL_DUPLEX_STREAMED:
            return [Reply(message.kind)]
        if before is ResponsePhase.DONE:
            return []
        return _echoed(message)


def _at_once(data: Buffer) -> bytes | Body:
    """Return a body that came in one message."""
    return Body([data]) if len(data) > WHOLE_BYTES else bytes(data)


def _announced_length(headers: Mapping[str, str]) -> int:
    text = headers.get("content-length", "")
    return int(text) if text.isdecimal() and len(text) < 19 else 0


def _echoed(message: Message) -> list[Output]:
    if len(message.data) <= CHUNK_BYTES:
        return [Reply(message.kind, chunk=message.data, end_of_stream=message.end_of_stream)]
    pieces = Body([message.data]).pieces()
    return list(_in_chunks(message.kind, pieces, end_of_stream=message.end_of_stream))


def _in_chunks(kind: Kind, pieces: Sequence[Buffer], *, end_of_stream: bool) -> Iterator[Reply]:
    """Yield an unchanged body in chunks that a proxy accepts; at least one, the last one with the end of stream."""
    if not pieces:
        yield Reply(kind, chunk=b"", end_of_stream=end_of_stream)
    for at, piece in enumerate(pieces, 1):
        yield Reply(kind, chunk=piece, end_of_stream=end_of_stream and at == len(pieces))
