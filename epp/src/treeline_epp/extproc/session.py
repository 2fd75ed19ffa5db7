"""One ext_proc stream: its state machine, the routed request, and what it holds of everybody's bounds."""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

import msgspec
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from treeline_epp.extproc.clients import Clients
from treeline_epp.extproc.convert import UnknownMessage, body_modes, to_message, to_response
from treeline_epp.extproc.state import ExtProcError, ExtProcState, Kind, Message, Output, RequestPhase
from treeline_epp.requests import refusals
from treeline_epp.requests.body import Body, BodyBudget, Buffer
from treeline_epp.requests.messages import RouteRequest
from treeline_epp.requests.outline import Outline
from treeline_epp.requests.parse import is_large
from treeline_epp.requests.refusals import Refusal
from treeline_epp.requests.router import RoutedRequest, Router

log = logging.getLogger(__name__)

_SLICE_PIECES = 4
"""Pieces of a large body that are looked at before others get a turn: a few milliseconds."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What all streams of a port share. `body_bytes` bounds one request's body, `waiting` all of them together,
    `clients` the requests of each client. `strip_response_headers` keeps from clients what runtimes tell us in headers.
    """

    body_bytes: int
    strip_response_headers: bool = False
    clients: Clients | None = None
    waiting: BodyBudget = field(default_factory=lambda: BodyBudget(sys.maxsize))


class ExtProcSession:
    """One ext_proc stream, from its first message to its end. Close it in a `finally`."""

    def __init__(self, router: Router, limits: SessionLimits) -> None:
        self._router = router
        self._limits = limits
        self._client: str | None = None
        self._state: ExtProcState | None = None
        self._routed: RoutedRequest | None = None
        self._share = limits.waiting.open()

    @property
    def ended(self) -> bool:
        """There is nothing more to say: the response's headers or an immediate response were the last word."""
        return self._state is not None and self._state.finished

    def steps(self, request: pb.ProcessingRequest, large: Buffer | None = None) -> Iterator[bytes | None]:
        """The serialized answers to one message of the proxy; None where others should have a turn before it goes on.

        `large` is a body as `convert.read` gives it. Never raises.
        """
        if self._state is None:
            self._state = ExtProcState(*body_modes(request), body_limit=self._limits.body_bytes)
        state = self._state
        try:
            message = to_message(request, large)
            outputs = self._receive(state, message)
        except (ExtProcError, UnknownMessage) as error:
            log.warning("ext_proc: %s", error)
            self._router.metrics.protocol_errors.inc()
            outputs = state.refuse(refusals.internal_error())
        else:
            if message.kind is Kind.RESPONSE_HEADERS and self._routed is not None:
                self._router.complete(self._routed, message.headers, message.served)
            if outputs and isinstance(asked := outputs[-1], RouteRequest):
                outputs = yield from self._route(state, asked)
        outputs.reverse()
        while outputs:  # each is dropped when it is on its way
            output = outputs.pop()
            assert not isinstance(output, RouteRequest)
            yield to_response(output, strip_response_headers=self._limits.strip_response_headers)
        if state.request_phase is not RequestPhase.COLLECTING:
            self._share.close()

    def close(self) -> None:
        """The stream has ended, in whatever way."""
        self._share.close()
        if self._routed is not None:
            self._router.release(self._routed)
        if self._limits.clients is not None and self._client is not None:
            self._limits.clients.leave(self._client)
            self._client = None

    def _receive(self, state: ExtProcState, message: Message) -> list[Output]:
        """What the state machine says, unless a bound is reached. Raises `ExtProcError`."""
        clients, waiting = self._limits.clients, self._limits.waiting
        if message.kind is Kind.REQUEST_BODY and not self._share.take(len(message.data)):
            return state.refuse(self._refused(refusals.no_room(waiting.limit)))
        outputs = state.receive(message)
        if clients is not None and message.kind is Kind.REQUEST_HEADERS:
            self._client = clients.enter(message.headers)
            if self._client is None:
                return state.refuse(self._refused(refusals.too_many_requests(clients.limit)))
        return outputs

    def _route(self, state: ExtProcState, request: RouteRequest) -> Generator[None, None, list[Output]]:
        outline: Outline | None = None
        if request.body is not None and is_large(request.body):
            body = request.body if isinstance(request.body, Body) else Body([request.body])
            request = msgspec.structs.replace(request, body=body)
            outline = Outline()
            for at, piece in enumerate(body.pieces(), 1):
                outline.feed(piece)
                if at % _SLICE_PIECES == 0:
                    yield
            outline.finish(body)
            yield
        result = self._router.route(request, outline)
        if isinstance(result, RoutedRequest):
            self._routed = result
            return state.answer(result.destination, result.body)
        return state.refuse(result) if isinstance(result, Refusal) else state.respond(result)

    def _refused(self, why: Refusal) -> Refusal:
        self._router.metrics.refusals.labels(why.code).inc()
        return why
