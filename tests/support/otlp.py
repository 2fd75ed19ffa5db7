"""A collector: a real OTLP/gRPC server that keeps the received spans."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

T = TypeVar("T")
_PATIENCE_S = 30.0


class CollectedSpan:
    """A span, its service, and its attributes as plain values. Ids are hexadecimal, as in `traceparent`."""

    def __init__(self, service: str, span: Span) -> None:
        self.service = service
        self.name = span.name
        self.trace, self.id, self.parent = (found.hex() for found in (span.trace_id, span.span_id, span.parent_span_id))
        self.kind = Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower()
        self.attributes = {one.key: _plain(one.value) for one in span.attributes}
        self.failed = span.status.code == 2
        self.start_ns, self.end_ns = span.start_time_unix_nano, span.end_time_unix_nano

    def __repr__(self) -> str:
        return f"{self.service}/{self.name} ({self.kind}) {self.id} of {self.parent or 'nobody'} in {self.trace}"


def _plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(one) for one in value.array_value.values]
    return None if kind is None else getattr(value, kind)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Its `endpoint` is for OTEL_EXPORTER_OTLP_ENDPOINT."""

    def __init__(self) -> None:
        self._spans: list[CollectedSpan] = []
        self._changed = threading.Condition()
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def Export(self, request: Any, context: Any) -> Any:
        found = []
        for resource in request.resource_spans:
            about = {one.key: _plain(one.value) for one in resource.resource.attributes}
            spans = (span for scope in resource.scope_spans for span in scope.spans)
            found += [CollectedSpan(about.get("service.name", ""), span) for span in spans]
        with self._changed:
            self._spans += found
            self._changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait_for(self, trace: str, *names: str) -> dict[str, CollectedSpan]:
        """Wait for spans of a trace with these names. Return all its spans by name."""

        def found() -> dict[str, CollectedSpan]:
            spans = {span.name: span for span in self._spans if span.trace == trace}
            return spans if spans.keys() >= set(names) else {}

        return self._until(found, f"spans {names} in {trace}")

    def trace_with(self, attribute: str, value: str) -> str:
        """Wait for the span with this attribute. Return its trace id."""
        return self._until(
            lambda: next((span.trace for span in self._spans if span.attributes.get(attribute) == value), ""),
            f"a span whose {attribute} is {value}",
        )

    def _until(self, found: Callable[[], T], what: str) -> T:
        deadline = time.monotonic() + _PATIENCE_S
        with self._changed:
            while not (value := found()):
                left = deadline - time.monotonic()
                assert left > 0, f"not within {_PATIENCE_S} s: {what}; there are {self._spans}"
                self._changed.wait(left)
            return value

    @property
    def traces(self) -> set[str]:
        """Return the ids of traces that have spans."""
        with self._changed:
            return {span.trace for span in self._spans}


@contextlib.contextmanager
def running_collector() -> Iterator[Collector]:
    collector = Collector()
    collector._server.start()
    try:
        yield collector
    finally:
        collector._server.stop(0).wait()
