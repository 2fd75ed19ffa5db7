"""OpenTelemetry's SDK as the picker and the runtime use it: where spans go, which are recorded, and an end in time.

Imported only by who was started with `--tracing`, and has the SDK among its own dependencies: it costs some 15 MB.
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
    logging.getLogger(_name).setLevel(logging.ERROR)  # they warn of what clients send, in clients' words


def exporter() -> SpanExporter | None:
    """Where spans go, by `OTEL_TRACES_EXPORTER`; None for nowhere. Raises TracingError."""
    name = exporter_name()
    if name == "none":
        return None
    return ConsoleSpanExporter() if name == "console" else OTLPSpanExporter()


def provider(spans: SpanExporter, service: str) -> TracerProvider:
    """With the resource and the sampler that the variables ask for. `service`: its name, where they say none. Raises
    TracingError."""
    sampler: Sampler | None = None  # the SDK reads it from the environment
    if not os.environ.get(SAMPLER):
        sampler = ParentBased(TraceIdRatioBased(ratio()))
    said = os.environ.get(OTEL_SERVICE_NAME) or "service.name=" in os.environ.get(OTEL_RESOURCE_ATTRIBUTES, "")
    resource = Resource.create(None if said else {SERVICE_NAME: service})
    made = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
    made.add_span_processor(BatchSpanProcessor(spans))
    return made


async def stop(provider: TracerProvider, limit_s: float) -> None:
    """Send what there is, for so many seconds at most."""
    # Not by the loop's own threads: the process would wait for them, however long a collector says nothing.
    stopping = threading.Thread(target=provider.shutdown, daemon=True)
    stopping.start()
    await asyncio.to_thread(stopping.join, limit_s)
