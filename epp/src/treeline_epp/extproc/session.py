"""One ext_proc stream: its state machine, the routed request, and its share of the limits."""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec
from google.protobuf.message import DecodeError
from treeline_wire import headers as names

from treeline_epp.extproc.clients import Clients, Present, TooMuch
from treeline_epp.extproc.convert import Reader, UnknownMessage, override_timeout, to_response
from treeline_epp.extproc.state import (
    BodyMode,
    ExtProcError,
    ExtProcState,
    Kind,
    Message,
    Output,
    Reply,
    RequestPhase,
    ResponsePhase,
)
from treeline_epp.flow.ticket import Awaited, Ticket
from treeline_epp.metrics import Sample
from treeline_epp.picking.decision import Lease
from treeline_epp.requests import refusals
from treeline_epp.requests.body import Body, BodyBudget, RouteRequest
from treeline_epp.requests.content import hash_contents
from treeline_epp.requests.outline import Outline
from treeline_epp.requests.parse import is_large
from treeline_epp.requests.prefilling import MOST_S
from treeline_epp.requests.refusals import Refusal
from treeline_epp.requests.rewrite import to_send
from treeline_epp.requests.router import Routed, Router

log = logging.getLogger(__name__)

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
_OVERHEAD_BYTES = 4 * 1024 * 1024
"""Room in a message besides the body: headers, metadata, and bodies a little over the limit, which get a proper 413."""

_FULL_DUPLEX = (BodyMode.FULL_DUPLEX_STREAMED, BodyMode.FULL_DUPLEX_STREAMED)
_UNDECIDED = frozenset({RequestPhase.IDLE, RequestPhase.COLLECTING, RequestPhase.DECIDING})
_NOT_TOLD = "fail: missing destination endpoint served metadata"
"""The reference picker's text for the conformance tests."""
_NO_METADATA: Mapping[str, str] = {}
_TRACE = (names.TRACEPARENT, names.TRACESTATE)
_TRIES = 3
"""Most decisions for one request, if endpoints that compute no prompts get none: as many errors open a breaker."""
_SLICE_PIECES = 4
"""Pieces of a large body that are parsed before others get a turn: a few milliseconds."""


class BadMessage(ValueError):
    """The proxy's message is no `ProcessingRequest`."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """The limits and the reader that all streams of a port share. `body_bytes` bounds one request's body, `waiting` all
    of them together, `clients` the requests of each client. `strip_response_headers` hides from clients the headers
    that runtimes send us, `tell_served` tells them which endpoint answered (for conformance tests).
    """

    body_bytes: int
    strip_response_headers: bool = False
    tell_served: bool = False
    clients: Clients | None = None
    waiting: BodyBudget = field(default_factory=lambda: BodyBudget(sys.maxsize))
    reader: Reader = field(default_factory=Reader)
    """The reader of their messages."""

    def samples(self) -> Iterator[Sample]:
        """Yield samples for the metrics page."""
        text = "Bytes of request bodies in memory until their endpoint is chosen, without the first 64 KiB of each."
        yield "gauge", "waiting_body_bytes", text, {}, self.waiting.bytes


class ExtProcSession:
    """One ext_proc stream, from its first message to its end; counted while it is open. Close it in a `finally`: Envoy
    ends a stream by half-closing it, by a reset, or by dying."""

    def __init__(self, router: Router, limits: SessionLimits, metadata: Mapping[str, str] = _NO_METADATA) -> None:
        """Begin a stream; `metadata` is that of the call."""
        self._router = router
        self._limits = limits
        self._metadata = metadata
        self._present: Present | None = None
        self._state: ExtProcState | None = None
        self._held: Lease | Ticket[Routed] | None = None
        """The router's result for the request."""
        self._share = limits.waiting.open()
        self._observed = False
        self._has_time = False
        router.metrics.open_streams += 1

    @property
    def ended(self) -> bool:
        """Whether the stream has no more answers and waits for nothing."""
        return self._said and not self._counts

    @property
    def lingers(self) -> bool:
        """Whether the stream has no more answers, but the client's request counts until its answer has ended."""
        return self._said and self._counts

    @property
    def _said(self) -> bool:
        """Whether the last answer is given: to the response's headers, or an immediate response. A request that the
        proxy only shows needs no more once it is decided.
        """
        state = self._state
        if state is None:
            return False
        return state.finished or (self._observed and state.request_phase not in _UNDECIDED)

    @property
    def _counts(self) -> bool:
        return self._present is not None and self._present.keyed and not (self._state is None or self._state.closed)

    def answers(self, data: bytes | None) -> Iterator[bytes | Awaited | None]:
        """Yield the serialized answers to one message of the proxy; None where others should have a turn before it goes
        on, or a result to wait for (if the caller goes on earlier, it yields that again). `data` is None if the message
        is too large to be read, and then it is the last.

        Raises BadMessage, at the first step; nothing else.
        """
        if data is None:
            state = self._state or self._begun(None)
            if state.request_phase in _UNDECIDED:
                yield from self._serialized(state.refuse(refusals.body_too_large(self._limits.body_bytes)))
            return
        try:
            message = self._limits.reader.read(data)
        except DecodeError as error:
            self._router.metrics.protocol_errors.inc()
            raise BadMessage(f"not a ProcessingRequest: {error}") from None
        except UnknownMessage as error:
            self._observed = self._observed or error.observed
            yield from self._serialized(self._broken(self._state or self._begun(None), error))
            return
        self._observed = self._observed or message.observed
        state = self._state or self._begun(message.modes)
        waiting = state.response_phase is ResponsePhase.WAITING
        try:
            outputs = self._receive(state, message)
        except ExtProcError as error:
            outputs = self._broken(state, error)
        else:
            if isinstance(lease := self._held, Lease):
                begins = waiting and state.response_phase is not ResponsePhase.WAITING
                ended = state.response_phase is ResponsePhase.DONE
                headers = message.headers if begins else None
                shown = message.data if message.kind is Kind.RESPONSE_BODY else b""
                told = self._router.response(lease, headers, message.served, shown, ended=ended)
                outputs = _with(outputs, headers=told) if told else outputs
            if self._limits.tell_served and message.kind is Kind.RESPONSE_HEADERS:
                outputs = _with(outputs, served=message.served or _NOT_TOLD)
            if outputs and isinstance(asked := outputs[-1], RouteRequest):
                outputs = yield from self._route(state, asked)
        yield from self._serialized(outputs)
        if state.request_phase is not RequestPhase.COLLECTING:
            self._share.close()
            if self._present is not None:
                self._present.arrived()

    def _begun(self, modes: tuple[BodyMode, BodyMode] | None) -> ExtProcState:
        """Make the state for the first message. A proxy that names no body modes follows the endpoint picker protocol,
        which is full duplex both ways; one that only shows a body waits for no answer before its end.
        """
        request, response = modes or _FULL_DUPLEX
        if self._observed and request is BodyMode.STREAMED:
            request = BodyMode.FULL_DUPLEX_STREAMED
        self._state = ExtProcState(request, response, body_limit=self._limits.body_bytes)
        return self._state

    def _broken(self, state: ExtProcState, error: Exception) -> list[Output]:
        log.warning("ext_proc: %s", error)
        self._router.metrics.protocol_errors.inc()
        return state.refuse(refusals.internal_error())

    def _serialized(self, outputs: list[Output]) -> Iterator[bytes]:
        if self._observed:
            return
        strip = self._limits.strip_response_headers
        outputs.reverse()
        while outputs:  # each is dropped once it is sent
            output = outputs.pop()
            assert not isinstance(output, RouteRequest)
            yield to_response(output, strip_response_headers=strip)

    def close(self, *, lost: bool = False) -> None:
        """Take the end of the stream, however it ended; `lost`: its connection broke, so the proxy may go on with a
        request that was decided, and it counts for a while.
        """
        self._router.metrics.open_streams -= 1
        self._share.close()
        if self._held is not None:
            self._router.release(self._held)
        if self._present is not None:
            if lost and isinstance(self._held, Lease):
                self._present.lose()
            self._present.close()

    def _receive(self, state: ExtProcState, message: Message) -> list[Output]:
        """Take a message; return the answers, or a refusal if a bound is reached. Raises `ExtProcError`."""
        clients, waiting = self._limits.clients, self._limits.waiting
        if message.kind is Kind.REQUEST_HEADERS and names.TRACEPARENT in self._metadata:
            # A proxy that traces sends its own span with the call: it is later than the client's.
            told = {name: self._metadata[name] for name in _TRACE if name in self._metadata}
            message = msgspec.structs.replace(message, headers={**message.headers, **told})
        if message.kind is Kind.REQUEST_BODY and not self._share.take(len(message.data)):
            return state.refuse(self._refused(refusals.no_room(waiting.limit)))
        outputs = state.receive(message)
        if clients is not None and message.kind is Kind.REQUEST_HEADERS:
            try:
                self._present = clients.enter(message.headers, has_body=not message.end_of_stream)
            except TooMuch as error:
                return state.refuse(self._refused(refusals.too_many_requests(str(error))))
        return outputs

    def _route(
        self, state: ExtProcState, request: RouteRequest
    ) -> Generator[bytes | Awaited | None, None, list[Output]]:
        outline: Outline | None = None
        if self._observed:
            request = msgspec.structs.replace(request, observed=True)
        if request.body is not None and is_large(request.body):
            body = request.body if isinstance(request.body, Body) else Body([request.body])
            request = msgspec.structs.replace(request, body=body)
            outline = Outline()
            for at, piece in enumerate(body.pieces(), 1):
                outline.feed(piece)
                if at % _SLICE_PIECES == 0:
                    yield None
            outline.finish(body)
            yield None
            yield from hash_contents(body, outline)
        for _ in range(_TRIES):
            result = yield from self._decided(state, request, outline)
            if not isinstance(result, Lease):
                return state.refuse(result) if isinstance(result, Refusal) else state.respond(result)
            if (yield from self._handed_over(state, request, outline, result)):
                break
            self._router.release(result, unsent=True)
        else:
            return state.refuse(self._refused(refusals.no_prefill()))
        parsed = result.decision.request
        # who asks again, and gets a closed lease, shows a body that was changed the first time, or another's
        changed = not result.closed and (parsed.rewrite or parsed.members is not None or result.members)
        sent = to_send(request.body, outline, parsed, result.members) if changed else None
        return state.answer(result.destination, sent, result.added)

    def _decided(
        self, state: ExtProcState, request: RouteRequest, outline: Outline | None
    ) -> Generator[bytes | Awaited | None, None, Routed]:
        result = self._router.route(request, outline)
        if isinstance(result, Ticket):  # its body counts as waiting until the decision
            self._held = ticket = result
            if not ticket.done:
                yield from self._asks_for_time(state, ticket.limit_s + MOST_S)
            while not ticket.done:
                yield ticket
            result = self._router.resume(ticket)
        self._held = result if isinstance(result, Lease) and not self._observed else None
        return result

    def _handed_over(
        self, state: ExtProcState, request: RouteRequest, outline: Outline | None, lease: Lease
    ) -> Generator[bytes | Awaited | None, None, bool]:
        """Let another endpoint compute the prompt, if the decision says so. Returns False if it did not, and the
        endpoint that was to answer cannot.
        """
        prompt = self._router.prefilling.begin(lease, request, outline)
        if prompt is not None and not prompt.done:
            yield from self._asks_for_time(state, MOST_S)
            while not prompt.done:
                yield prompt
        return not self._router.prefilling.failed(lease)

    def _asks_for_time(self, state: ExtProcState, seconds: float) -> Iterator[bytes]:
        """Ask the proxy to wait longer, which it accepts once."""
        if state.timed and not self._has_time:
            self._has_time = True
            yield override_timeout(seconds)

    def _refused(self, why: Refusal) -> Refusal:
        self._router.metrics.refusals.labels(why.code).inc()
        return why


def _with(outputs: list[Output], **more: object) -> list[Output]:
    """Return the outputs with more fields on the reply to response headers."""
    return [
        msgspec.structs.replace(output, **more)
        if isinstance(output, Reply) and output.kind is Kind.RESPONSE_HEADERS
        else output
        for output in outputs
    ]


def most_message_bytes(body_limit: int) -> int:
    """Return the largest message of a proxy whose bodies have at most `body_limit` bytes."""
    return body_limit + _OVERHEAD_BYTES
