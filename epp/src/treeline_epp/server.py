"""The ext_proc service on grpc.aio: a driver that moves messages between a stream, its exchange and the router."""

from __future__ import annotations

import logging
from typing import Any

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from treeline_epp import refusal
from treeline_epp.convert import UnknownMessage, body_modes, to_message, to_response
from treeline_epp.exchange import Action, Decide, Exchange, ExchangeError, Kind
from treeline_epp.refusal import Refusal
from treeline_epp.routing import Route, Router

log = logging.getLogger(__name__)

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
_OVERHEAD_BYTES = 4 * 1024 * 1024
"""Room in a message beyond the body: headers, metadata, and bodies a little over the limit, which get a proper 413."""


class Stream:
    """One ext_proc stream: its exchange, and the route it was given. Close it in a ``finally``."""

    def __init__(self, router: Router, body_limit: int, *, hiding: bool = False) -> None:
        self._router = router
        self._body_limit = body_limit
        self._hiding = hiding
        self._exchange: Exchange | None = None
        self._route: Route | None = None

    @property
    def ended(self) -> bool:
        """There is nothing more to say: the response's headers or an immediate response were the last word."""
        return self._exchange is not None and self._exchange.finished

    def step(self, request: pb.ProcessingRequest) -> list[bytes]:
        """The serialized answers to one message of the proxy. Never raises."""
        if self._exchange is None:
            self._exchange = Exchange(*body_modes(request), body_limit=self._body_limit)
        try:
            message = to_message(request)
            actions = self._exchange.receive(message)
        except (ExchangeError, UnknownMessage) as error:
            log.warning("ext_proc: %s", error)
            self._router.metrics.protocol_errors.inc()
            actions = self._exchange.refuse(refusal.defect())
        else:
            if message.kind is Kind.RESPONSE_HEADERS and self._route is not None:
                self._route.settle(message.headers, message.served)
            if actions and isinstance(decide := actions[-1], Decide):
                actions = self._decide(self._exchange, decide)
        hiding = self._hiding
        return [to_response(action, hiding=hiding) for action in actions if not isinstance(action, Decide)]

    def close(self) -> None:
        """The stream has ended, in whatever way."""
        if self._route is not None:
            self._route.close()

    def _decide(self, exchange: Exchange, decide: Decide) -> list[Action]:
        result = self._router.route(decide)
        if isinstance(result, Route):
            self._route = result
            return exchange.answer(result.destination, result.body)
        return exchange.refuse(result) if isinstance(result, Refusal) else exchange.respond(result)


class ExtProc:
    """The ``ExternalProcessor`` service. ``body_limit`` is in bytes; ``hiding`` keeps from clients what runtimes tell
    us in headers."""

    def __init__(self, router: Router, body_limit: int, *, hiding: bool = False) -> None:
        self._router = router
        self._body_limit = body_limit
        self._hiding = hiding

    def handler(self) -> grpc.GenericRpcHandler:
        """What to add to a server."""
        process: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
            self._process, request_deserializer=pb.ProcessingRequest.FromString
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"Process": process})

    async def _process(self, _requests: Any, context: Any) -> None:
        stream = Stream(self._router, self._body_limit, hiding=self._hiding)
        streams = self._router.metrics.streams
        streams.inc()
        try:
            while (request := await context.read()) is not grpc.aio.EOF:
                for reply in stream.step(request):
                    await context.write(reply)
                if stream.ended:
                    return
        finally:
            # Envoy ends a stream by half-closing it, by a reset (which cancels us here), or by dying.
            streams.dec()
            stream.close()


def server_options(body_limit: int) -> list[tuple[str, int]]:
    """gRPC settings for the port that carries ext_proc."""
    return [
        ("grpc.max_receive_message_length", body_limit + _OVERHEAD_BYTES),
        ("grpc.max_send_message_length", -1),
        # One busy port should be an error, not a second picker that takes half of the streams.
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", 1 << 20),
    ]
