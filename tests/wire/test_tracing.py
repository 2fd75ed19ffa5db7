"""Tracing shared by picker, runtime and Envoy: the meaning of OpenTelemetry's variables."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import ConsoleSpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from treeline_wire import tracing_env
from treeline_wire.tracing import exporter, provider, stop
from treeline_wire.tracing_env import TracingError


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


def test_a_tenth_is_sampled_under_the_name_of_the_service_unless_variables_say_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = provider(InMemorySpanExporter(), "ours")
    assert "root:TraceIdRatioBased{0.1}" in made.sampler.get_description()
    assert made.resource.attributes["service.name"] == "ours"
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=mine,zone=a")
    made = provider(InMemorySpanExporter(), "ours")
    assert made.sampler.get_description() == "TraceIdRatioBased{0.5}"
    assert (made.resource.attributes["service.name"], made.resource.attributes["zone"]) == ("mine", "a")


def test_the_exporter_is_chosen_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    made = exporter()
    assert isinstance(made, OTLPSpanExporter)
    made.shutdown()
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    assert isinstance(exporter(), ConsoleSpanExporter)
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert exporter() is None


@pytest.mark.parametrize(
    ("sampler", "argument", "share"),
    [
        ("", "", 0.1),
        ("", "0.25", 0.25),
        ("parentbased_always_on", "", 1.0),
        ("always_off", "", 0.0),
        ("traceidratio", "", 1.0),
        ("parentbased_traceidratio", "0.5", 0.5),
    ],
)
def test_envoy_samples_by_the_variables(
    monkeypatch: pytest.MonkeyPatch, sampler: str, argument: str, share: float
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", argument)
    assert tracing_env.ratio() == share
    if sampler.endswith("traceidratio"):
        assert f"TraceIdRatioBased{{{share}}}" in provider(InMemorySpanExporter(), "ours").sampler.get_description()


@pytest.mark.parametrize(("sampler", "argument"), [("jaeger_remote", ""), ("traceidratio", "2"), ("", "nan")])
def test_a_share_that_is_no_number_from_0_to_1_is_refused(
    monkeypatch: pytest.MonkeyPatch, sampler: str, argument: str
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", argument)
    with pytest.raises(TracingError, match="OTEL_TRACES_SAMPLER"):
        tracing_env.ratio()


def test_the_endpoint_of_traces_overrides_the_general_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tracing_env.collector(tracing_env.endpoint()) == ("localhost", 4317)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector.observability")
    assert tracing_env.collector(tracing_env.endpoint()) == ("collector.observability", 4317)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://[::1]:4400/")
    assert tracing_env.collector(tracing_env.endpoint()) == ("::1", 4400)


@pytest.mark.parametrize(
    "url",
    ["https://c:4317", "c:4317", "http://", "http://c:99999", "http://c/v1/traces", "http://u:p@c", "http://c?a=b"],
)
def test_a_url_that_envoy_cannot_send_to_is_refused(url: str) -> None:
    with pytest.raises(TracingError, match="is not a collector's URL"):
        tracing_env.collector(url)


def test_an_operation_is_named_by_its_path() -> None:
    found = {path: tracing_env.operation_of(path) for path in ("/v1/chat/completions", "/v1/completions/", "/generate")}
    assert list(found.values()) == ["chat", "text_completion", "text_completion"]
    assert tracing_env.operation_of("/v2/rerank") == "rerank"
    assert tracing_env.operation_of("/health_generate") == ""


async def test_a_silent_collector_does_not_delay_the_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    class Silent(InMemorySpanExporter):
        def export(self, spans: Any) -> Any:
            released.wait(300)
            return super().export(spans)

    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
    made = provider(Silent(), "ours")
    made.get_tracer("test").start_span("one").end()
    await asyncio.wait_for(stop(made, 0.05), 60)
    released.set()


@pytest.mark.parametrize("module", ["treeline_epp.main", "treeline_runtime.serve"])
def test_the_sdk_is_not_loaded_without_the_flag(module: str) -> None:
    says = f"import sys, {module}; print([name for name in sys.modules if name.startswith('opentelemetry.sdk')])"
    done = subprocess.run([sys.executable, "-c", says], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.strip() == "[]"
