"""OpenTelemetry traces: the spans of a request in the picker, between the client's span and the engine's.

The client's context comes in `traceparent` (W3C), and that of a proxy which traces itself with the call
(`extproc.session`). Its child `gateway.request` lasts as long as the picker sees the request, and the engine gets it in
the same header; `gateway.request_orchestration` within it is the choice. The names are those of GIE's picker.
Attributes follow OpenTelemetry's GenAI conventions where those exist; no prompt and no answer is among them. The client
decides about sampling; without its word a tenth is sampled, as in GIE (`OTEL_TRACES_SAMPLER`). Imported only with
`--tracing`: the SDK costs some 15 MB.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from treeline_wire import tracing
from treeline_wire.tracing_env import operation_of

from treeline_epp.endpoints.spec import split_address
from treeline_epp.requests.exchange import Exchange, Observer

SERVICE: Final = "treeline-epp"
"""The `service.name`, unless the variables set another."""
REQUEST, CHOICE = "gateway.request", "gateway.request_orchestration"
_STOP_S = 5.0
_LONGEST = 256


class Tracing(Observer):
    """Makes the spans of exchanges, and keeps them by exchange while their request is open."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("treeline_epp")
        self._propagator = TraceContextTextMapPropagator()
        self._open: dict[Exchange, Span] = {}

    async def stop(self) -> None:
        """Send the remaining spans, for a few seconds at most."""
        await tracing.stop(self._provider, _STOP_S)

    def asked(self, exchange: Exchange, headers: Mapping[str, str]) -> None:
        """Begin the request's span; if it is recorded, the engine gets its context."""
        parent = self._propagator.extract(headers)
        span = self._tracer.start_span(REQUEST, parent, kind=SpanKind.SERVER, start_time=int(exchange.wall_time * 1e9))
        if not span.is_recording():
            if not trace.get_current_span(parent).get_span_context().is_valid:
                self._tell(exchange, span)  # the engine should not sample it either
            return
        self._open[exchange] = span
        self._tell(exchange, span)

    def _tell(self, exchange: Exchange, span: Span) -> None:
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, trace.set_span_in_context(span))
        exchange.added.extend(carrier.items())

    def decided(self, exchange: Exchange) -> None:
        """Add a span for the choice."""
        span = self._open.get(exchange)
        if span is None:
            return
        began = int(exchange.wall_time * 1e9)
        ended = began + int((exchange.decided_at - exchange.started_at) * 1e9)
        choice = self._tracer.start_span(CHOICE, trace.set_span_in_context(span), start_time=began)
        span.set_attributes(_of_request(exchange))
        if exchange.decision is not None:
            choice.set_attributes(_of_choice(exchange))
        if exchange.refusal is not None:
            choice.set_attribute("error.type", exchange.refusal.code)
            choice.set_status(Status(StatusCode.ERROR))
        choice.end(ended)
        if exchange.decision is None and exchange.refusal is None:  # answered here, like a list of models
            self._open.pop(exchange).end(ended)

    def ended(self, exchange: Exchange) -> None:
        """End the request's span, with the data of the response."""
        span = self._open.pop(exchange, None)
        if span is None:
            return
        span.set_attributes(_of_response(exchange))
        if exchange.status is not None and exchange.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end()


def _of_request(exchange: Exchange) -> dict[str, AttributeValue]:
    found = {
        "gen_ai.operation.name": operation_of(exchange.path),
        "gen_ai.request.model": exchange.model,
        "url.path": exchange.path,
        "http.request.header.x-request-id": exchange.id,
        "treeline.flow": exchange.flow,
    }
    return {name: value[:_LONGEST] for name, value in found.items() if value}


def _of_choice(exchange: Exchange) -> dict[str, AttributeValue]:
    decision = exchange.decision
    assert decision is not None
    best = decision.best
    host, port = split_address(decision.endpoint.address)
    return {
        "server.address": host,
        "server.port": int(port or 0),
        "gen_ai.request.model": exchange.target,
        "treeline.endpoint": decision.endpoint.name,
        "treeline.pool": decision.endpoint.pool,
        "treeline.policy": decision.policy,
        "treeline.priority": exchange.priority,
        "treeline.fallbacks": [spec.name for spec in decision.fallbacks],
        "treeline.predicted_ttft_s": best.ttft_s,
        "treeline.predicted_cached_tokens": best.candidate.cached_tokens,
        "treeline.predicted_uncached_tokens": best.candidate.uncached_tokens,
        "treeline.queued_tokens": best.queued_tokens,
    }


def _of_response(exchange: Exchange) -> dict[str, AttributeValue]:
    usage, refusal = exchange.usage, exchange.refusal
    found: dict[str, AttributeValue | None] = {
        "http.response.status_code": exchange.status,
        "error.type": None if refusal is None else refusal.code,
        "gen_ai.usage.input_tokens": usage.prompt,
        "gen_ai.usage.cache_read.input_tokens": usage.cached,
        "gen_ai.usage.output_tokens": usage.output,
        "gen_ai.response.time_to_first_chunk": exchange.ttft_s,
        "treeline.served_by": exchange.served,
    }
    return {name: value for name, value in found.items() if value is not None}
