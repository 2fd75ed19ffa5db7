"""OpenTelemetry traces: a request's time here, in its sender's trace.

A request's span is a child of `traceparent` (W3C), the picker's or another proxy's. Its `queue`, `prefill` and `decode`
spans cover all its generations: until the first had its turn, until the first token (or vector), until the last.
Attributes follow OpenTelemetry's GenAI conventions and vLLM's `gen_ai.latency.*`, without prompts and answers. The
sender decides on sampling, or else the variables (`treeline_wire.tracing`).

Imported only with `--tracing`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from starlette.requests import Request
from treeline_wire import headers as names
from treeline_wire import tracing
from treeline_wire.tracing_env import operation_of

from treeline_runtime.messages import FinishReason, SamplingParams, TextOut
from treeline_runtime.server.errors import ApiError, ClientGone
from treeline_runtime.server.jobs import Generations

SERVICE: Final = "treeline-runtime"
"""`service.name`, unless the variables set another."""
QUEUE, PREFILL, DECODE = "queue", "prefill", "decode"
_CONTEXT: Final = (names.TRACEPARENT, names.TRACESTATE)
_LONGEST = 256
"""Characters of values that clients choose."""
_MOST_REASONS = 64
"""Generations whose end is reported."""


class Tracing:
    """Makes the spans of requests."""

    def __init__(self, provider: TracerProvider, model: str) -> None:
        """model: its name in requests."""
        self._provider = provider
        self._tracer = provider.get_tracer("treeline_runtime")
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    async def stop(self, limit_s: float) -> None:
        """Sends remaining spans, for at most so many seconds."""
        await tracing.stop(self._provider, limit_s)

    def begin(self, request: Request) -> RequestSpan | None:
        """The span of a request, if it is recorded."""
        operation = operation_of(request.url.path)
        if not operation:  # a probe
            return None
        carrier = {name: value for name in _CONTEXT if (value := request.headers.get(name)) is not None}
        parent = self._propagator.extract(carrier)
        span = self._tracer.start_span(f"{operation} {self._model}", parent, kind=SpanKind.SERVER)
        if not span.is_recording():
            return None
        span.set_attributes({**_of_http(request), "gen_ai.operation.name": operation})
        span.set_attribute("gen_ai.provider.name", "treeline")
        return RequestSpan(self._tracer, span, self._model)


class RequestSpan:
    """A recorded request's span, and what its generations add."""

    def __init__(self, tracer: Tracer, span: Span, model: str, clock: Callable[[], int] = time.time_ns) -> None:
        """clock: nanoseconds since 1970."""
        self._tracer = tracer
        self._span = span
        self._model = model
        self._clock = clock
        self._came_ns = clock()
        self._began_ns: int | None = None
        self._turn_ns: int | None = None
        self._first_ns: int | None = None
        self._last_ns: int | None = None
        self._job: Generations | None = None
        self._last: dict[int, TextOut] = {}
        """The last output of each generation, without its text."""
        self._status: int | None = None
        self._error: str | None = None

    def began(self, job: Generations) -> None:
        self._began_ns, self._job = self._clock(), job
        self._span.set_attributes(_of_job(job, self._model))

    def came(self, index: int, out: TextOut) -> None:
        now = self._clock()
        if self._began_ns is not None and self._first_ns is None and (out.token_ids or out.vector is not None):
            self._first_ns = now
            self._turn_ns = min(now, self._began_ns + int(out.queued_s * 1e9))
        self._last_ns = now
        self._last[index] = TextOut(
            rid="",
            text="",
            token_ids=[],
            finish=out.finish,
            cached_tokens=out.cached_tokens,
            completion_tokens=out.completion_tokens,
        )
        if (finish := out.finish) is not None and finish.type in ("abort", "error"):
            self._error = self._error or _error_of(finish)

    def answered(self) -> None:
        """Its answer begins, without an error."""
        self._status = 200

    def failed(self, error: BaseException) -> None:
        if isinstance(error, ApiError):
            self._status = error.status
            self._error = self._error or error.told["code"] or str(error.status)
        elif isinstance(error, ClientGone | asyncio.CancelledError):
            self._error = "client_gone"
        else:
            self._status, self._error = 500, type(error).__name__

    def end(self, *, streamed: bool) -> None:
        if streamed:
            self._status = 200  # an error that came later was its last event
        self._stages()
        self._span.set_attributes(self._of_answer(streamed=streamed))
        refused = self._status is not None and 400 <= self._status < 500
        if self._error is not None and not refused:
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()

    def _stages(self) -> None:
        """The inner spans; none for a request that ended before its first token, whose stage is unknown."""
        if self._job is None or self._first_ns is None:
            return
        context = trace.set_span_in_context(self._span)
        stages = [(QUEUE, self._began_ns, self._turn_ns), (PREFILL, self._turn_ns, self._first_ns)]
        if not self._job.prompts[0].pools:
            stages.append((DECODE, self._first_ns, self._last_ns))
        for name, begin, end in stages:
            self._tracer.start_span(name, context, start_time=begin).end(end)

    def _of_answer(self, *, streamed: bool) -> dict[str, AttributeValue]:
        found: dict[str, AttributeValue | None] = {"http.response.status_code": self._status, "error.type": self._error}
        job, began = self._job, self._began_ns
        if job is None or began is None:
            return _known(found)
        outs = sorted(self._last.items())
        if self._first_ns is not None:
            found["gen_ai.usage.input_tokens"] = job.prompt_tokens
            cached = sum(out.cached_tokens for index, out in outs if index % job.n == 0)
            found["gen_ai.usage.cache_read.input_tokens"] = cached
            if not job.prompts[0].pools:
                found["gen_ai.usage.output_tokens"] = sum(out.completion_tokens for _, out in outs)
            if streamed:
                found["gen_ai.response.time_to_first_chunk"] = _seconds(self._came_ns, self._first_ns)
        reasons = [out.finish.type for _, out in outs[:_MOST_REASONS] if out.finish is not None]
        found["gen_ai.response.finish_reasons"] = reasons or None
        found |= {
            "gen_ai.latency.time_in_queue": _seconds(began, self._turn_ns),
            "gen_ai.latency.time_in_model_prefill": _seconds(self._turn_ns, self._first_ns),
            "gen_ai.latency.time_in_model_decode": _seconds(self._first_ns, self._last_ns),
            "gen_ai.latency.time_to_first_token": _seconds(self._came_ns, self._first_ns),
            "gen_ai.latency.e2e": _seconds(self._came_ns, self._clock()),
        }
        return _known(found)


def _error_of(finish: FinishReason) -> str:
    """`error.type` of a failed end: never its message, which may quote the request."""
    return "aborted" if finish.type == "abort" and finish.status is None else str(finish.status or 500)


def _seconds(begin_ns: int | None, end_ns: int | None) -> float | None:
    return None if begin_ns is None or end_ns is None else (end_ns - begin_ns) / 1e9


def _known(found: Mapping[str, AttributeValue | None]) -> dict[str, AttributeValue]:
    return {name: value for name, value in found.items() if value is not None}


def _of_http(request: Request) -> dict[str, AttributeValue]:
    id = request.headers.get(names.REQUEST_ID)
    found: dict[str, AttributeValue | None] = {
        "http.request.method": request.method,
        "url.path": request.url.path,
        "http.request.header.x-request-id": None if id is None else id[:_LONGEST],
    }
    return _known(found)


def _of_job(job: Generations, model: str) -> dict[str, AttributeValue]:
    found: dict[str, Any] = {
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": job.rid,
        "gen_ai.request.choice.count": job.n if job.n > 1 else None,
        "treeline.prompts": len(job.prompts) if len(job.prompts) > 1 else None,
        "treeline.priority": job.prompts[0].priority or None,
    }
    if not job.prompts[0].pools:
        found |= _of_sampling(job.prompts[0].sampling)
    return _known(found)


def _of_sampling(sampling: SamplingParams) -> dict[str, AttributeValue | None]:
    """The span's attributes from the first prompt's sampling; in `/generate` other prompts may differ."""
    return {
        "gen_ai.request.max_tokens": sampling.max_new_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k if sampling.top_k > 0 else None,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty or None,
        "gen_ai.request.presence_penalty": sampling.presence_penalty or None,
        "gen_ai.request.seed": sampling.seed,
    }
