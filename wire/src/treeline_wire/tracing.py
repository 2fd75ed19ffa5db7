"""OpenTelemetry's SDK for picker and runtime: exporter, sampler, and a shutdown with a deadline.

Imported only with `--tracing`, by programs that depend on the SDK; it costs some 15 MB.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_RESOURCE_ATTRIBUTES, OTEL_SERVICE_NAME
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, TraceIdRatioBased

from treeline_wire.tracing_env import SAMPLER, exporter_name, ratio

for _name in ("opentelemetry.trace.propagation.tracecontext", "opentelemetry.trace.span"):
    logging.getLogger(_name).setLevel(logging.ERROR)  # their warnings quote clients


def exporter() -> SpanExporter | None:
    """Makes the span exporter that `OTEL_TRACES_EXPORTER` names; None for none. Raises TracingError."""
    name = exporter_name()
    if name == "none":
        return None
    return ConsoleSpanExporter() if name == "console" else OTLPSpanExporter()


def provider(spans: SpanExporter, service: str) -> TracerProvider:
    """Makes a provider with resource and sampler from the variables. `service`: its name if they give none. Raises
    TracingError.
    """
    sampler: Sampler | None = None  # the SDK reads it from the environment
    if not os.environ.get(SAMPLER):
        sampler = ParentBased(TraceIdRatioBased(ratio()))
    said = os.environ.get(OTEL_SERVICE_NAME) or "service.name=" in os.environ.get(OTEL_RESOURCE_ATTRIBUTES, "")
    resource = Resource.create(None if said else {SERVICE_NAME: service})
    made = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
    made.add_span_processor(BatchSpanProcessor(spans))
    return made


async def stop(provider: TracerProvider, limit_s: float) -> None:
    """Sends remaining spans, for at most `limit_s`."""
    # In a daemon thread: the process would wait for the loop's own threads while a collector hangs.
    stopping = threading.Thread(target=provider.shutdown, daemon=True)
    stopping.start()
    await asyncio.to_thread(stopping.join, limit_s)
