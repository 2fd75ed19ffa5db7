"""Traces of requests: their owner, their contents, and what they leave out (fake scheduler, real OTLP)."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.fake_scheduler import Magic
from support.otlp import CollectedSpan, Collector, running_collector
from support.runtime_server import ServerProcess, let_go, make_checkpoint, running
from treeline_runtime.messages import FinishReason, GenerateReq, SamplingParams, TextOut
from treeline_runtime.server.errors import ApiError, ClientGone
from treeline_runtime.server.jobs import Generations
from treeline_runtime.server.tracing import RequestSpan
from treeline_wire.tracing import provider

pytestmark = pytest.mark.deep

CALLER = "00f067aa0ba902b7"
SECRET = "Versailles"
CHAT = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 4, "temperature": 0.5}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with running_collector() as found:
        yield found


@pytest.fixture(scope="module")
def server(model: Path, collector: Collector) -> Iterator[ServerProcess]:
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "50"}
    with running(model, "--no-events", "--tracing", fake=True, environment=variables) as found:
        yield found


def context(*, sampled: bool = True) -> tuple[str, dict[str, str]]:
    """Return a trace id, and the headers of a request in it."""
    trace = uuid.uuid4().hex
    return trace, {"traceparent": f"00-{trace}-{CALLER}-{int(sampled):02x}", "x-request-id": f"id-{trace[:8]}"}


def asked(
    http: httpx.Client,
    collector: Collector,
    path: str,
    body: dict[str, Any],
    on_headers: Callable[[], None] = lambda: None,
) -> tuple[httpx.Response, CollectedSpan, dict[str, CollectedSpan]]:
    """Return the answer, the request's span, and all spans of its trace by name."""
    trace, headers = context()
    with http.stream("POST", path, json=body, headers=headers) as answer:
        on_headers()
        answer.read()
    spans = collector.wait_for(trace, name := f"{OPERATIONS[path]} random")
    return answer, spans[name], spans


OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/api/chat": "chat",
    "/v1/completions": "text_completion",
    "/generate": "text_completion",
    "/v1/embeddings": "embeddings",
}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "stream": True}),
        ("/v1/completions", {"prompt": SECRET, "max_tokens": 4, "temperature": 0.5}),
        ("/generate", {"text": SECRET, "sampling_params": {"max_new_tokens": 4, "temperature": 0.5}}),
        ("/v1/responses", {"input": SECRET, "max_output_tokens": 4, "temperature": 0.5, "stream": True}),
        ("/v1/messages", CHAT),
        (
            "/api/chat",
            {"messages": CHAT["messages"], "options": {"num_predict": 4, "temperature": 0.5}, "stream": True},
        ),
    ],
)
def test_a_request_is_the_child_of_its_caller_and_has_three_stages(
    http: httpx.Client, collector: Collector, path: str, body: dict[str, Any]
) -> None:
    answer, span, spans = asked(http, collector, path, {"model": "random", **body} if path != "/generate" else body)
    assert answer.status_code == 200
    assert (span.parent, span.kind, span.service, span.failed) == (CALLER, "server", "treeline-runtime", False)
    assert set(spans) == {span.name, "queue", "prefill", "decode"}
    stages = [spans[name] for name in ("queue", "prefill", "decode")]
    assert {stage.parent for stage in stages} == {span.id}
    times = [span.start_ns, *(t for stage in stages for t in (stage.start_ns, stage.end_ns)), span.end_ns]
    assert times == sorted(times)
    told = span.attributes
    assert told["gen_ai.operation.name"] == OPERATIONS[path]
    assert told["gen_ai.request.model"] == told["gen_ai.response.model"] == "random"
    assert (told["gen_ai.request.max_tokens"], told["gen_ai.request.temperature"]) == (4, 0.5)
    assert told["gen_ai.usage.output_tokens"] == 4
    assert told["gen_ai.usage.input_tokens"] > told["gen_ai.usage.cache_read.input_tokens"] == 3
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert told["http.request.header.x-request-id"] == f"id-{span.trace[:8]}"
    assert ("gen_ai.response.time_to_first_chunk" in told) == ("stream" in body)
    assert told["gen_ai.latency.e2e"] >= told["gen_ai.latency.time_to_first_token"] > 0
    assert SECRET not in str([one.attributes for one in spans.values()])
    assert answer.text not in str([one.attributes for one in spans.values()])


def test_several_generations_are_one_span_with_the_sum_of_their_tokens(
    http: httpx.Client, collector: Collector
) -> None:
    body = {"model": "random", "prompt": [[70, 71, 72], [73, 74]], "n": 2, "max_tokens": 5}
    _, span, spans = asked(http, collector, "/v1/completions", body)
    assert len(spans) == 4
    told = span.attributes
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (5, 20)
    assert told["gen_ai.response.finish_reasons"] == ["length"] * 4
    assert (told["gen_ai.request.choice.count"], told["treeline.prompts"]) == (2, 2)


def test_a_refusal_is_an_error_only_where_the_server_is_at_fault(http: httpx.Client, collector: Collector) -> None:
    _, unknown, _ = asked(http, collector, "/v1/completions", {"model": SECRET, "prompt": "x"})
    assert (unknown.attributes["http.response.status_code"], unknown.failed) == (404, False)
    assert unknown.attributes["error.type"] == "model_not_found"
    assert SECRET not in str(unknown.attributes)
    full = {"model": "random", "prompt": [Magic.REFUSE, 70]}
    _, refused, spans = asked(http, collector, "/v1/completions", full)
    assert (refused.attributes["http.response.status_code"], refused.failed) == (503, True)
    assert len(spans) == 1, "there was no token, so no stage is known"


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_within_an_answer_is_recorded_in_its_span(
    server: ServerProcess, http: httpx.Client, collector: Collector, stream: bool
) -> None:
    prompt = [Magic.BREAK, Magic.HELD if stream else 70]
    body = {"model": "random", "prompt": prompt, "max_tokens": 9, "stream": stream}
    let = partial(let_go, server.url) if stream else lambda: None
    answer, span, _ = asked(http, collector, "/v1/completions", body, let)
    assert span.failed
    assert span.attributes["http.response.status_code"] == answer.status_code == (200 if stream else 500)
    assert span.attributes["error.type"] == "500"
    assert span.attributes["gen_ai.response.finish_reasons"] == ["error"]


def test_a_client_that_leaves_ends_the_span_with_an_error(http: httpx.Client, collector: Collector) -> None:
    trace, headers = context()
    body = {"model": "random", "prompt": [70, 71], "max_tokens": 4000, "stream": True}
    with http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        next(answer.iter_bytes())
    spans = collector.wait_for(trace, "text_completion random")
    span = spans["text_completion random"]
    assert (span.failed, span.attributes["error.type"]) == (True, "client_gone")
    assert 0 < span.attributes["gen_ai.usage.output_tokens"] < 4000
    assert "decode" in spans


def test_an_abort_by_an_operator_is_an_error(http: httpx.Client, admin: httpx.Client, collector: Collector) -> None:
    trace, headers = context()
    body = {"model": "random", "prompt": [70, 71], "max_tokens": 4000, "stream": True, "rid": "ended"}
    with http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        frames = answer.iter_bytes()
        next(frames)
        assert admin.post("/abort_request", json={"rid": "ended"}).status_code == 200
        for _ in frames:
            pass
    span = collector.wait_for(trace, "text_completion random")["text_completion random"]
    assert (span.failed, span.attributes["error.type"]) == (True, "aborted")
    assert span.attributes["gen_ai.response.finish_reasons"] == ["abort"]


def test_unsampled_requests_and_probes_are_not_recorded(http: httpx.Client, collector: Collector) -> None:
    unsampled, headers = context(sampled=False)
    assert http.post("/v1/chat/completions", json={"model": "random", **CHAT}, headers=headers).status_code == 200
    probe, headers = context()
    for path in ("/health_generate", "/v1/models"):
        assert http.get(path, headers=headers).status_code == 200
    asked(http, collector, "/v1/completions", {"model": "random", "prompt": "later", "max_tokens": 1})
    assert not {unsampled, probe} & collector.traces


@pytest.mark.parametrize("header", ["nonsense", f"00-{'0' * 32}-{CALLER}-01", "é".encode().decode("latin-1")])
def test_a_context_that_cannot_be_read_disturbs_nothing(http: httpx.Client, server: ServerProcess, header: str) -> None:
    answer = http.post(
        "/v1/chat/completions", json={"model": "random", **CHAT}, headers={"traceparent": header.encode("latin-1")}
    )
    assert answer.status_code == 200
    assert not [line for line in server.log if header in line]


def test_an_embedding_has_no_decode(tmp_path: Path, collector: Collector) -> None:
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "50"}
    folder = make_checkpoint(tmp_path / "random")
    flags = ("--no-events", "--tracing", "--task=embed")
    with running(folder, *flags, fake=True, environment=variables) as server, server.client() as http:
        answer, span, spans = asked(http, collector, "/v1/embeddings", {"model": "random", "input": SECRET})
    assert answer.status_code == 200
    assert set(spans) == {span.name, "queue", "prefill"}
    assert span.attributes["gen_ai.usage.input_tokens"] == answer.json()["usage"]["prompt_tokens"]
    assert "gen_ai.usage.output_tokens" not in span.attributes


def test_variables_for_unsupported_exporters_end_the_start(model: Path) -> None:
    server = ServerProcess(model, "--no-events", "--tracing", fake=True, environment={"OTEL_TRACES_EXPORTER": "zipkin"})
    assert server.wait() == 1
    assert any("--tracing: OTEL_TRACES_EXPORTER=zipkin" in line for line in server.log)


# ---- the times, by a clock of the test ------------------------------------------------------------------------------


def recorded(*steps: Any) -> dict[str, ReadableSpan]:
    """Return the spans of a request with these steps, a second apart."""
    memory, now = InMemorySpanExporter(), [10**18]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_TRACES_SAMPLER", "always_on")
        made = provider(memory, "ours")
    tracer = made.get_tracer("test")
    span = RequestSpan(tracer, tracer.start_span("request", start_time=now[0]), "m", clock=lambda: now[0])
    for step in steps:
        now[0] += 10**9
        step(span)
    span.end(streamed=False)
    made.shutdown()
    return {one.name: one for one in memory.get_finished_spans()}


def seconds(span: ReadableSpan) -> tuple[float, float]:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.start_time - 10**18) / 1e9, (span.end_time - 10**18) / 1e9


JOB = Generations(rid="r", prompts=[GenerateReq("", [1, 2, 3], SamplingParams(stop=(SECRET,), seed=7))])


def out(*tokens: int, finish: FinishReason | None = None, queued_s: float = 0.0) -> TextOut:
    counts = {"prompt_tokens": 3, "cached_tokens": 2, "completion_tokens": len(tokens)}
    return TextOut("r", "text", list(tokens), finish, **counts, queued_s=queued_s)


def test_the_stages_are_the_schedulers_wait_the_first_token_and_the_last() -> None:
    spans = recorded(
        lambda span: span.began(JOB),
        lambda span: span.came(0, out(5, queued_s=0.25)),
        lambda span: span.came(0, out(6, 7, finish=FinishReason("stop"))),
        lambda span: span.answered(),
    )
    assert [seconds(spans[name]) for name in ("queue", "prefill", "decode")] == [(1, 1.25), (1.25, 2), (2, 3)]
    told = spans["request"].attributes
    assert told is not None
    assert told["gen_ai.latency.time_in_queue"] == 0.25
    assert told["gen_ai.latency.time_in_model_prefill"] == 0.75
    assert told["gen_ai.latency.time_in_model_decode"] == 1
    assert told["gen_ai.latency.time_to_first_token"] == 2
    assert told["gen_ai.latency.e2e"] == 4
    assert (told["gen_ai.request.seed"], told["gen_ai.response.id"]) == (7, "r")
    assert SECRET not in str(dict(told))


def test_a_recorded_error_has_its_kind_and_no_prompt_text() -> None:
    spans = recorded(lambda span: span.failed(ApiError(400, SECRET, code="invalid_value")))
    assert spans["request"].status.is_unset
    assert dict(spans["request"].attributes or {}) == {"http.response.status_code": 400, "error.type": "invalid_value"}
    for error, kind in ((ClientGone(), "client_gone"), (RuntimeError(SECRET), "RuntimeError")):
        spans = recorded(lambda span, error=error: span.failed(error))
        assert not spans["request"].status.is_ok
        assert SECRET not in spans["request"].to_json()
        assert (spans["request"].attributes or {})["error.type"] == kind
