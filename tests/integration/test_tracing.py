"""One trace of client, Envoy, picker and runtime: real processes, and a real OTLP receiver."""

from __future__ import annotations

import uuid

import pytest
from support.otlp import CollectedSpan, Collector, running_collector
from support.stack import Stack, running_stack
from treeline_operator.envoy import Tracing

pytestmark = [pytest.mark.integration, pytest.mark.deep]

CLIENT = "00f067aa0ba902b7"
SECRET = "Versailles"
EDGE, CALL, ATTEMPT = (
    "ingress",
    "async envoy.service.ext_proc.v3.ExternalProcessor.Process egress",
    "router pods egress",
)
PICKER, CHOICE = "gateway.request", "gateway.request_orchestration"
RUNTIME = "chat tiny"
STAGES = ("queue", "prefill", "decode")
PARENTS = {
    CALL: EDGE,
    PICKER: CALL,
    CHOICE: PICKER,
    ATTEMPT: EDGE,
    RUNTIME: ATTEMPT,
    **dict.fromkeys(STAGES, RUNTIME),
}


@pytest.fixture(scope="module")
def collector():
    with running_collector() as found:
        yield found


@pytest.fixture(scope="module")
def traced(tmp_path_factory, collector: Collector):
    """One runtime, the picker and Envoy, all of which trace."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        patch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_on")
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        edge = Tracing("127.0.0.1", collector.port, ratio=1.0)
        with running_stack(tmp_path_factory.mktemp("traced"), replicas=1, tracing=edge) as stack:
            yield stack


def ask(stack: Stack, headers: dict[str, str]):
    body = {"model": "tiny", "messages": [{"role": "user", "content": f"What is {SECRET}?"}], "max_tokens": 4}
    answer = stack.http.post(f"{stack.url}/v1/chat/completions?key={SECRET}", json=body, headers=headers)
    assert answer.status_code == 200
    return answer


def spans_of(collector: Collector, trace: str) -> dict[str, CollectedSpan]:
    """Wait for the trace's spans; Envoy sends its own every five seconds."""
    return collector.wait_for(trace, EDGE, CALL, ATTEMPT, PICKER, CHOICE, RUNTIME, *STAGES)


def test_one_trace_joins_client_envoy_picker_and_runtime(traced: Stack, collector: Collector):
    trace, unsampled, id = uuid.uuid4().hex, uuid.uuid4().hex, str(uuid.uuid4())
    ask(traced, {"traceparent": f"00-{unsampled}-{CLIENT}-00"})
    answer = ask(traced, {"traceparent": f"00-{trace}-{CLIENT}-01", "x-request-id": id})
    assert answer.headers["x-request-id"] == id, "Envoy notes nothing in it"
    spans = spans_of(collector, trace)
    assert spans.keys() == {EDGE, *PARENTS}
    assert unsampled not in collector.traces, "an unsampled request is recorded nowhere"
    assert spans[EDGE].parent == CLIENT
    assert {name: spans[name].parent for name in PARENTS} == {name: spans[of].id for name, of in PARENTS.items()}
    services = {spans[name].service for name in (EDGE, PICKER, RUNTIME)}
    assert services == {"treeline-edge", "treeline-epp", "treeline-runtime"}
    picked, served = spans[PICKER].attributes, spans[RUNTIME].attributes
    assert picked["gen_ai.usage.input_tokens"] == served["gen_ai.usage.input_tokens"] > 4
    assert spans[EDGE].attributes["guid:x-request-id"] == served["http.request.header.x-request-id"] == id
    assert spans[EDGE].attributes["http.url"] == "/v1/chat/completions"
    assert served["gen_ai.latency.time_in_queue"] >= 0
    said = answer.json()["choices"][0]["message"]["content"]
    told = str([span.attributes for span in spans.values()])
    assert SECRET not in told
    assert said not in told


def test_a_trace_begun_by_envoy_joins_all_parts(traced: Stack, collector: Collector):
    id = str(uuid.uuid4())
    ask(traced, {"x-request-id": id})
    spans = spans_of(collector, collector.trace_with("guid:x-request-id", id))
    assert spans[EDGE].parent == ""
    assert spans[EDGE].attributes["guid:x-request-id"] == id
    assert {name: spans[name].parent for name in PARENTS} == {name: spans[of].id for name, of in PARENTS.items()}
