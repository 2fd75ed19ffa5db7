"""OpenTelemetry's variables on which picker, runtime and Envoy must agree; Envoy reads no variables and is configured
from these. The SDK reads the others itself and is not needed here.
"""

from __future__ import annotations

import os
from typing import Final
from urllib.parse import urlsplit

PORT: Final = 4317
"""The port of OTLP over gRPC."""
RATIO: Final = 0.1
"""The share of requests without a trace that start one."""
ENDPOINT: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Variables with the collector's URL; the first that is set wins."""
EXPORTER: Final = "OTEL_TRACES_EXPORTER"
PROTOCOL: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
SAMPLER: Final = "OTEL_TRACES_SAMPLER"
SAMPLER_ARG: Final = "OTEL_TRACES_SAMPLER_ARG"

_OPERATIONS: Final = (
    ("/chat/completions", "chat"),
    ("/responses", "chat"),
    ("/messages", "chat"),
    ("/api/chat", "chat"),
    ("/completions", "text_completion"),
    ("/generate", "text_completion"),
    ("/embeddings", "embeddings"),
    ("/pooling", "embeddings"),
    ("/classify", "classify"),
    ("/rerank", "rerank"),
    ("/score", "score"),
)
"""`gen_ai.operation.name` by the end of a path; the first match wins. The last three are our own."""


class TracingError(Exception):
    """The variables have an unsupported value; the message says what to do."""


def operation_of(path: str) -> str:
    """Returns `gen_ai.operation.name` of a request; empty for a path that generates nothing."""
    path = path.rstrip("/")
    return next((name for suffix, name in _OPERATIONS if path.endswith(suffix)), "")


def exporter_name() -> str:
    """Returns `otlp`, `console` or `none`. Raises TracingError for others, and for OTLP by a protocol other than
    gRPC.
    """
    name = os.environ.get(EXPORTER, "") or "otlp"
    if name not in ("otlp", "console", "none"):
        raise TracingError(f"{EXPORTER}={name}: there are otlp, console and none")
    if name == "otlp":
        for variable in PROTOCOL:
            protocol = os.environ.get(variable, "")
            if protocol not in ("", "grpc"):
                asked = f"{variable}={protocol}"
                raise TracingError(f"{asked}: only grpc is supported; send to a collector's port for it ({PORT})")
    return name


def endpoint() -> str:
    """Returns the collector's URL."""
    return next((found for name in ENDPOINT if (found := os.environ.get(name))), f"http://localhost:{PORT}")


def collector(url: str) -> tuple[str, int]:
    """Returns host and port of a collector in plain text. Raises TracingError for other URLs."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise TracingError(f"{url!r} is not a collector's URL: {error}") from None
    if parts.scheme != "http" or not host or parts.path not in ("", "/") or parts.query or parts.username:
        raise TracingError(f"{url!r} is not a collector's URL that Envoy can use: use http://HOST:{PORT}")
    return host, port or PORT


def ratio() -> float:
    """Returns the share of requests without a trace that start one: 0 to 1. Raises TracingError."""
    name = os.environ.get(SAMPLER, "")
    if name in ("always_on", "parentbased_always_on"):
        return 1.0
    if name in ("always_off", "parentbased_always_off"):
        return 0.0
    if name not in ("", "traceidratio", "parentbased_traceidratio"):
        raise TracingError(f"{SAMPLER}={name}: there are always_on, always_off, traceidratio, and parentbased_ of each")
    text = os.environ.get(SAMPLER_ARG, "") or ("1" if name else str(RATIO))
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise TracingError(f"{SAMPLER_ARG}={text}: expected a number from 0 to 1")
    return share
