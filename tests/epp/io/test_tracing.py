"""Traces: the client's goes on through the picker to the engine, and what is not sampled is left alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.proxy import NONE, Proxy
from treeline_epp.main import main
from treeline_epp.requests.exchange import Exchange, Observers
from treeline_epp.tracing import CHOICE, REQUEST, SERVICE, Tracing
from treeline_wire import headers as names
from treeline_wire.tracing import provider

TRACE, CLIENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{CLIENT}-01", f"00-{TRACE}-{CLIENT}-00"


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


class Traced:
    """A picker with traces in memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_on")
        self.memory = InMemorySpanExporter()
        self.provider: TracerProvider = provider(self.memory, SERVICE)
        self.tracing = Tracing(self.provider)
        self.proxy = Proxy([self.tracing])

    def spans(self) -> dict[str, ReadableSpan]:
        self.provider.force_flush()
        found = self.memory.get_finished_spans()
        assert not self.tracing._open, "no span is left open"
        return {span.name: span for span in found}

    def sent(self, **opened: Any) -> dict[str, str]:
        """The request headers that the picker has the proxy set."""
        replies = self.proxy.open(**opened)
        mutation = replies[-1].request_body.response.header_mutation
        return {one.header.key: one.header.raw_value.decode() for one in mutation.set_headers}


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traced]:
    made = Traced(monkeypatch)
    yield made
    made.provider.shutdown()


def test_a_request_is_the_clients_child_and_the_engines_parent(traced: Traced) -> None:
    sent = traced.sent(headers={names.TRACEPARENT: SAMPLED, names.TRACESTATE: "vendor=1"})
    traced.proxy.answer(**{"content-type": "text/event-stream"})
    traced.proxy.chunk(b'data: {"usage": {"prompt_tokens": 200, "completion_tokens": 7}}\n\n', ends=True)
    traced.proxy.close()
    spans = traced.spans()
    request, choice = spans[REQUEST], spans[CHOICE]
    assert request.context is not None
    assert request.parent is not None
    assert choice.parent is not None
    assert f"{request.context.trace_id:032x}" == TRACE
    assert f"{request.parent.span_id:016x}" == CLIENT
    assert choice.parent.span_id == request.context.span_id
    assert sent[names.TRACEPARENT] == f"00-{TRACE}-{request.context.span_id:016x}-01"
    assert sent[names.TRACESTATE] == "vendor=1"
    assert sent[names.DESTINATION], "the destination is there besides"
    assert request.attributes is not None
    assert choice.attributes is not None
    assert dict(request.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "tiny",
        "url.path": "/v1/chat/completions",
        "http.request.header.x-request-id": "r1",
        "treeline.flow": "default-flow",
        "http.response.status_code": 200,
        "gen_ai.usage.input_tokens": 200,
        "gen_ai.usage.output_tokens": 7,
        "gen_ai.response.time_to_first_chunk": 0.0,
    }
    assert choice.attributes["treeline.endpoint"] in ("e0", "e1")
    assert choice.attributes["server.port"] == 8000
    assert choice.attributes["treeline.predicted_cached_tokens"] == 0


def test_what_the_client_does_not_sample_is_neither_recorded_nor_changed(traced: Traced) -> None:
    sent = traced.sent(headers={names.TRACEPARENT: UNSAMPLED})
    traced.proxy.close()
    assert traced.spans() == {}
    assert names.TRACEPARENT not in sent, "it goes on as it came"


@pytest.mark.parametrize("header", [None, "nonsense", f"{SAMPLED},{SAMPLED}"])
def test_whom_nobody_samples_the_engine_does_not_sample_either(
    monkeypatch: pytest.MonkeyPatch, header: str | None
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    off = provider(InMemorySpanExporter(), SERVICE)
    proxy = Proxy([Tracing(off)])
    replies = proxy.open(headers={} if header is None else {names.TRACEPARENT: header})
    proxy.close()
    off.shutdown()
    mutation = replies[-1].request_body.response.header_mutation
    (told,) = [one.header.raw_value for one in mutation.set_headers if one.header.key == names.TRACEPARENT]
    assert int(told.rsplit(b"-")[-1], 16) & 1 == 0, "in the place of what could not be read"


@pytest.mark.parametrize("header", [None, "nonsense", f"00-{'0' * 32}-{CLIENT}-01", f"ff-{TRACE}-{CLIENT}-01", "é"])
def test_without_a_context_that_can_be_read_a_trace_begins(traced: Traced, header: str | None) -> None:
    sent = traced.sent(headers={} if header is None else {names.TRACEPARENT: header})
    traced.proxy.close()
    request = traced.spans()[REQUEST]
    assert request.parent is None
    assert request.context is not None
    begun = f"00-{request.context.trace_id:032x}-{request.context.span_id:016x}-"
    assert sent[names.TRACEPARENT].startswith(begun)
    assert int(sent[names.TRACEPARENT].removeprefix(begun), 16) & 1, "sampled"


def test_what_a_proxy_tells_of_its_own_span_with_the_call_is_the_parent(traced: Traced) -> None:
    own = f"00-{TRACE}-{'b' * 16}-01"
    traced.sent(headers={names.TRACEPARENT: SAMPLED}, metadata={names.TRACEPARENT: own, "te": "trailers"})
    traced.proxy.close()
    parent = traced.spans()[REQUEST].parent
    assert parent is not None
    assert f"{parent.span_id:016x}" == "b" * 16


def test_a_trace_that_is_not_sampled_here_is_not_sampled_by_engines(
    traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    traced.proxy.router.observers = Observers([Tracing(provider(traced.memory, SERVICE))])
    sent = traced.sent()
    traced.proxy.close()
    assert not int(sent[names.TRACEPARENT][-2:], 16) & 1
    assert traced.spans() == {}


def test_a_refusal_is_an_error_of_the_choice(traced: Traced) -> None:
    traced.proxy.open(model="nobody-serves-this")
    traced.proxy.close()
    spans = traced.spans()
    assert spans[CHOICE].attributes is not None
    assert spans[REQUEST].attributes is not None
    assert spans[CHOICE].attributes["error.type"] == "model_not_found"
    assert spans[REQUEST].attributes["http.response.status_code"] == 404
    assert "gen_ai.request.model" not in spans[REQUEST].attributes, "any text could be a name"


def test_streams_that_end_early_leave_no_span_open_and_no_text_of_a_prompt_is_in_one(traced: Traced) -> None:
    traced.proxy.open(response=NONE)
    traced.proxy.answer(503)
    traced.proxy.close()
    traced.proxy.open()
    traced.proxy.close()
    traced.proxy.open(observed=True)
    traced.proxy.close()
    traced.spans()
    found = traced.memory.get_finished_spans()
    assert [span.name for span in found].count(REQUEST) == 3
    assert not any("France" in span.to_json() for span in found)
    statuses = [span.status.is_ok for span in found if span.name == REQUEST]
    assert statuses.count(False) == 1


def test_without_the_flag_headers_go_on_as_they_came() -> None:
    proxy = Proxy([])
    replies = proxy.open(headers={names.TRACEPARENT: SAMPLED})
    assert [h.header.key for h in replies[-1].request_body.response.header_mutation.set_headers] == [names.DESTINATION]


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin", "there are otlp, console and none"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf", "only grpc is supported"),
    ],
)
def test_variables_that_ask_for_what_there_is_not_keep_the_picker_from_starting(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], name: str, value: str, told: str
) -> None:
    monkeypatch.setenv(name, value)
    assert main(["--endpoint", "a=127.0.0.1:1", "--tracing"]) == 1
    assert told in capfd.readouterr().err


@pytest.mark.parametrize(
    ("parent", "state"),
    [("0" * 600, ""), (SAMPLED, "x" * 600), (SAMPLED, "no pair"), (SAMPLED, "a=1,a=2"), (SAMPLED, "UPPER=1")],
)
def test_clients_write_nothing_into_the_log(
    parent: str, state: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    traced = Traced(monkeypatch)
    exchange = Exchange("r", "/v1/completions", None, "f", 1, True, False, 0.0)
    traced.tracing.asked(exchange, {"traceparent": parent, "tracestate": state})
    assert not caplog.records
    assert exchange.added, "it is traced all the same"
