"""An ext_proc stream without gRPC: protobuf in, protobuf out, and the reservation in between."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from google.protobuf import json_format
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support.proxy import begun, head, replies, whole
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.extproc.clients import LOST_S, Clients
from treeline_epp.extproc.session import BadMessage, ExtProcSession, SessionLimits
from treeline_epp.index.pods import Hit
from treeline_epp.metrics import Metrics
from treeline_epp.picking.decision import Lease
from treeline_epp.picking.picker import Picker, PickerConfig
from treeline_epp.requests.body import RouteRequest
from treeline_epp.requests.model_registry import ModelRegistry
from treeline_epp.requests.router import Router
from treeline_wire import envoy_pb2 as pb
from treeline_wire import headers as names

MODES = pb.ProcessingMode
A, B = "10.0.0.1:8000", "10.0.0.2:8000"


class Bench:
    """A router over two endpoints, with a clock that a test turns."""

    def __init__(self) -> None:
        self.now = 100.0
        self.troubles: list[str] = []
        self.metrics = Metrics()
        registry = ModelRegistry()
        self.picker = Picker(PickerConfig(policy="round_robin"))
        for name, address in (("a", A), ("b", B)):
            self.picker.add_endpoint(EndpointSpec(name, address, models=("tiny",)))
            registry.set_endpoint(name, "default", ("tiny",), None)
        self.router = Router(
            self.picker, registry, self.metrics, on_trouble=self.troubles.append, clock=lambda: self.now
        )

    def stream(self) -> ExtProcSession:
        return ExtProcSession(self.router, SessionLimits(10_000))

    def reserved(self) -> int:
        return sum(len(e.load.reservations) for e in self.picker.endpoints.values())

    def counted(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"treeline_epp_{name}", labels) or 0.0


def headers(*, end: bool = False, subset: Any = None, mode: int = MODES.BUFFERED, **extra: str) -> pb.ProcessingRequest:
    request = head({":path": "/v1/completions", ":method": "POST", "x-request-id": "r1", **extra}, mode, end=end)
    if subset is not None:
        hint = request.metadata_context.filter_metadata[names.LB_SUBSET]
        json_format.ParseDict({names.SUBSET: subset}, hint)
    return request


def body(data: bytes = b'{"model": "tiny", "prompt": "hello"}') -> pb.ProcessingRequest:
    return whole(data)


def response(served: str | None = None, **fields: str) -> pb.ProcessingRequest:
    request = begun(**fields)
    if served is not None:
        request.metadata_context.filter_metadata[names.LB].fields[names.SERVED].string_value = served
    return request


def destination(reply: pb.ProcessingResponse, part: str = "request_body") -> str:
    """Return the destination in an answer; header and metadata must agree."""
    common = getattr(reply, part).response
    (option,) = common.header_mutation.set_headers
    assert option.header.key == names.DESTINATION
    assert common.clear_route_cache
    value: str = option.header.raw_value.decode()
    assert json_format.MessageToDict(reply.dynamic_metadata) == {names.LB: {names.DESTINATION: value}}
    return value


def test_a_request_reserves_until_its_response_begins() -> None:
    bench = Bench()
    stream = bench.stream()
    (plain,) = replies(stream, headers())
    assert plain.WhichOneof("response") == "request_headers"
    (reply,) = replies(stream, body())
    assert sorted(destination(reply).split(",")) == [A, B]
    assert bench.reserved() == 1
    bench.now += 0.5
    (reply,) = replies(stream, response(served=destination(reply).split(",")[0]))
    assert reply.WhichOneof("response") == "response_headers"
    assert bench.reserved() == 0
    stream.close()
    assert bench.counted("outcomes_total", outcome="headers") == 1
    assert bench.counted("outcomes_total", outcome="cancelled") == 0
    assert bench.troubles == []


@pytest.mark.parametrize("mode", [MODES.BUFFERED, MODES.FULL_DUPLEX_STREAMED])
def test_a_too_large_message_is_413_like_a_slightly_too_large_body(mode: int) -> None:
    bench = Bench()
    stream, large = bench.stream(), bench.stream()
    for one in (stream, large):
        replies(one, headers(mode=mode))
    (expected,) = replies(stream, body(b"x" * 10_001))
    (data,) = large.answers(None)
    assert isinstance(data, bytes)
    assert pb.ProcessingResponse.FromString(data) == expected
    assert expected.immediate_response.status.code == 413
    assert large.ended
    large.close()


def test_a_too_large_response_is_not_refused() -> None:
    bench = Bench()
    stream = bench.stream()
    replies(stream, headers())
    replies(stream, body())
    replies(stream, response())
    assert list(stream.answers(None)) == []
    stream.close()


@pytest.mark.parametrize(("decided", "lost", "counts"), [(True, True, 1), (True, False, 0), (False, True, 0)])
def test_a_clients_request_still_counts_after_its_connection_is_lost(decided: bool, lost: bool, counts: int) -> None:
    bench = Bench()
    clients = Clients(1, 1000, clock=lambda: bench.now)
    stream = ExtProcSession(bench.router, SessionLimits(10_000, clients=clients))
    replies(stream, headers(**{names.CLIENT: "ada"}))
    if decided:
        replies(stream, body())
    stream.close(lost=lost)
    assert len(clients) == counts
    bench.now += LOST_S
    clients.enter({names.CLIENT: "ada"}).close()
    assert len(clients) == 0


def test_a_repeated_request_of_a_proxy_gets_the_same_answer_and_counts_once() -> None:
    bench = Bench()
    streams = [bench.stream() for _ in range(4)]
    replies(streams[0], headers())
    (reply,) = replies(streams[0], body())
    first = destination(reply)
    for again in streams[1:]:
        replies(again, headers(**{names.DESTINATION: first}))
        (reply,) = replies(again, body())
        assert destination(reply) == first, "round robin would go on"
    assert bench.reserved() == 1
    for stream in reversed(streams):
        replies(stream, response(**{names.CACHED_TOKENS: "16", names.PROMPT_TOKENS: "40"}))
        stream.close()
    assert bench.reserved() == 0
    assert bench.counted("outcomes_total", outcome="headers") == 1
    assert bench.counted("reported_prompt_tokens_total") == 40


def test_an_invented_destination_and_an_expired_id_change_nothing() -> None:
    bench = Bench()
    first, other = bench.stream(), bench.stream()
    replies(first, headers())
    (reply,) = replies(first, body())
    chosen = destination(reply)
    replies(other, headers(**{names.DESTINATION: "10.9.9.9:1"}))
    (reply,) = replies(other, body())
    assert destination(reply) != chosen
    assert bench.reserved() == 2
    for stream in (first, other):
        replies(stream, response())
        stream.close()
    late = bench.stream()
    replies(late, headers(**{names.DESTINATION: chosen}))
    replies(late, body())
    assert bench.reserved() == 1, "a request of its own"


def test_a_stream_that_ends_early_releases_its_reservation() -> None:
    bench = Bench()
    stream = bench.stream()
    replies(stream, headers())
    replies(stream, body())
    stream.close()
    stream.close()
    assert bench.reserved() == 0
    assert bench.counted("outcomes_total", outcome="cancelled") == 1


def test_the_runtimes_report_is_counted_and_only_streams_give_a_ttft() -> None:
    bench = Bench()
    report = {names.CACHED_TOKENS: "16", names.PROMPT_TOKENS: "40"}
    for kind in ("application/json", "text/event-stream; charset=utf-8"):
        stream = bench.stream()
        replies(stream, headers())
        replies(stream, body())
        bench.now += 0.25
        replies(stream, response(**report, **{"content-type": kind}))
    assert bench.counted("reported_hit_tokens_total") == 32
    assert bench.counted("reported_prompt_tokens_total") == 80
    assert bench.counted("ttft_seconds_count") == 1
    assert bench.counted("ttft_seconds_sum") == pytest.approx(0.25)


def test_the_predicted_hit_is_counted_if_the_engine_reports_none() -> None:
    bench = Bench()
    request = RouteRequest(
        {":path": "/v1/completions", ":method": "POST"}, b'{"model": "tiny", "prompt": "hello"}', None
    )
    for status, held in (("200", 48), ("500", 96)):
        routed = bench.router.route(request)
        assert isinstance(routed, Lease)
        best = routed.decision.best
        found = replace(best.candidate, hit=Hit(held, held, held), cached_tokens=held + 5, uncached_tokens=16)
        found = replace(found, host_tokens=5)
        routed.decision = replace(routed.decision, ranked=(replace(best, candidate=found),))
        bench.router.response(routed, {":status": status}, None)
    assert bench.counted("routed_held_tokens_total") == 53, "an answer that failed used no cache"
    assert bench.counted("routed_loaded_tokens_total", tier="host") == 5
    assert bench.counted("routed_prompt_tokens_total") == 69
    assert bench.counted("reported_prompt_tokens_total") == 0


@pytest.mark.parametrize("status", ["301", "400", "404", "422", "429"])
def test_a_refused_request_trains_nothing(status: str) -> None:
    bench = Bench()
    request = RouteRequest(
        {":path": "/v1/completions", ":method": "POST"}, b'{"model": "tiny", "prompt": "hello"}', None
    )
    told = {names.CACHED_TOKENS: "16", names.PROMPT_TOKENS: "40", "content-type": "text/event-stream"}
    routed = bench.router.route(request)
    assert isinstance(routed, Lease)
    endpoint = routed.endpoint
    routed.decision = replace(routed.decision, request=replace(routed.decision.request, key=b"hello" * 20))
    load = endpoint.load
    before = (endpoint.keyed_prompts, endpoint.new_tokens, load.rate_samples)
    bench.router.response(routed, {":status": status, **told}, None)
    assert (endpoint.keyed_prompts, endpoint.new_tokens, load.rate_samples) == before
    assert bench.counted("reported_prompt_tokens_total") == 0
    assert bench.counted("routed_prompt_tokens_total") == 0
    assert bench.counted("outcomes_total", outcome="refused") == 1
    assert bench.reserved() == 0


def test_the_picker_removes_the_report_from_the_response_if_no_other_does() -> None:
    bench = Bench()
    stream = ExtProcSession(bench.router, SessionLimits(10_000, strip_response_headers=True))
    replies(stream, headers())
    (reply,) = replies(stream, body())
    assert not reply.request_body.response.header_mutation.remove_headers
    (reply,) = replies(stream, response(**{names.CACHED_TOKENS: "16", names.PROMPT_TOKENS: "40"}))
    removed = reply.response_headers.response.header_mutation.remove_headers
    assert sorted(removed) == [names.CACHED_TOKENS, names.PROMPT_TOKENS]
    assert bench.counted("reported_hit_tokens_total") == 16
    stream = bench.stream()
    (reply,) = replies(stream, response())
    assert not reply.response_headers.response.HasField("header_mutation")


@pytest.mark.parametrize("text", ["", "-1", "1e3", "９" * 3, "9" * 30])
def test_a_nonsense_report_is_ignored(text: str) -> None:
    bench = Bench()
    stream = bench.stream()
    replies(stream, headers())
    replies(stream, body())
    replies(stream, response(**{names.CACHED_TOKENS: text, names.PROMPT_TOKENS: text}))
    assert bench.counted("reported_prompt_tokens_total") == 0
    assert bench.reserved() == 0


def test_errors_and_detours_trigger_a_probe_and_overload_does_not() -> None:
    bench = Bench()

    def run(request: pb.ProcessingRequest) -> list[str]:
        bench.troubles.clear()
        stream = bench.stream()
        replies(stream, headers())
        replies(stream, body())
        replies(stream, request)
        return bench.troubles

    assert len(run(response(status="503"))) == 1
    assert run(response(**{"status": "503", names.OVERLOADED: "1"})) == []
    assert run(response(status="404")) == []
    assert len(run(response(served="10.9.9.9:1"))) == 1
    assert bench.counted("served_by_other_total", by="other") == 1


def test_a_subset_is_obeyed_also_without_a_body() -> None:
    bench = Bench()
    for _ in range(3):
        (reply,) = replies(bench.stream(), headers(end=True, subset=[B], **{":path": "/health"}))
        assert destination(reply, "request_headers") == B
    (reply,) = replies(bench.stream(), headers(end=True, subset="10.0.0.1", **{":path": "/health"}))
    assert destination(reply, "request_headers") == A
    for nothing in ([], ["10.0.0.9:1"]):
        (reply,) = replies(bench.stream(), headers(end=True, subset=nothing, **{":path": "/health"}))
        assert reply.immediate_response.status.code == 503


def test_a_refusal_is_an_immediate_response_and_ends_the_stream() -> None:
    bench = Bench()
    stream = bench.stream()
    replies(stream, headers())
    (reply,) = replies(stream, body(b'{"model": "nobody", "prompt": "x"}'))
    answer = reply.immediate_response
    assert answer.status.code == 404
    assert json.loads(answer.body)["error"]["code"] == "model_not_found"
    assert {h.header.key: h.header.raw_value for h in answer.headers.set_headers}["content-type"] == b"application/json"
    assert stream.ended
    assert bench.counted("refusals_total", code="model_not_found") == 1


def test_a_protocol_error_is_a_500_and_counted() -> None:
    bench, unknown = Bench(), pb.ProcessingRequest()
    for *before, request in ([headers(), headers()], [headers(), unknown], [unknown]):
        stream = bench.stream()
        for one in before:
            replies(stream, one)
        (reply,) = replies(stream, request)
        assert reply.immediate_response.status.code == 500
        assert stream.ended
    assert bench.counted("protocol_errors_total") == 3


def test_an_internal_error_is_a_500_and_not_a_grpc_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench()

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(bench.picker, "pick", fail)
    stream = bench.stream()
    replies(stream, headers())
    with caplog.at_level(logging.CRITICAL):
        (reply,) = replies(stream, body())
    assert reply.immediate_response.status.code == 500
    assert bench.counted("internal_errors_total") == 1


def test_a_decision_is_one_log_line_at_debug_level_without_prompt_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()
    with caplog.at_level(logging.DEBUG, "treeline_epp"):
        stream = bench.stream()
        replies(stream, headers())
        replies(stream, body(b'{"model": "tiny", "prompt": "a secret"}'))
    (line,) = [r for r in caplog.records if r.message == "decision"]
    fields = line.fields  # type: ignore[attr-defined]
    assert fields["request_id"] == "r1"
    assert "secret" not in json.dumps(fields)


def test_a_proxy_without_modes_gets_full_duplex() -> None:
    bench = Bench()
    stream = bench.stream()
    first = headers()
    first.ClearField("protocol_config")
    assert replies(stream, first) == []
    answers = replies(stream, body())
    assert [a.WhichOneof("response") for a in answers] == ["request_headers", "request_body"]
    assert answers[1].request_body.response.body_mutation.streamed_response.end_of_stream


REQUESTS = st.one_of(
    st.just(headers()),
    st.just(headers(end=True)),
    st.just(headers(mode=MODES.FULL_DUPLEX_STREAMED)),
    st.just(headers(mode=MODES.STREAMED)),
    st.just(body()),
    st.just(body(b"{")),
    st.just(response()),
    st.just(response(served="10.9.9.9:1")),
    st.just(pb.ProcessingRequest(request_trailers=pb.HttpTrailers())),
    st.just(pb.ProcessingRequest(response_body=pb.HttpBody(body=b"x"))),
    st.just(pb.ProcessingRequest(response_trailers=pb.HttpTrailers())),
    st.just(pb.ProcessingRequest()),
)


@settings(deadline=None)
@given(st.lists(st.lists(REQUESTS, max_size=6), max_size=4))
def test_any_messages_of_proxies_raise_nothing_and_leave_no_reservation(
    sessions: list[list[pb.ProcessingRequest]],
) -> None:
    logging.disable(logging.WARNING)
    try:
        bench = Bench()
        for session in sessions:
            stream = bench.stream()
            for request in session:
                for reply in replies(stream, request):
                    assert reply.WhichOneof("response") is not None
            stream.close()
        assert bench.reserved() == 0
        assert bench.counted("internal_errors_total") == 0
    finally:
        logging.disable(logging.NOTSET)


def test_a_removed_endpoint_leaves_no_label_behind() -> None:
    bench = Bench()
    stream = bench.stream()
    replies(stream, headers())
    replies(stream, body())
    bench.metrics.observe(lambda: iter([("gauge", "size", "Sizes.", {"of": "x"}, 3), ("counter", "n", "N.", {}, 1)]))
    (chosen,) = [name for name in ("a", "b") if bench.counted("decisions_total", endpoint=name)]
    bench.metrics.forget(chosen)
    bench.metrics.forget("nobody")
    text = bench.metrics.render().decode()
    assert "treeline_epp_decisions_total{" not in text
    assert 'treeline_epp_size{of="x"} 3.0' in text
    assert "treeline_epp_n_total 1.0" in text
    assert "_created" not in text


def shown(request: pb.ProcessingRequest) -> pb.ProcessingRequest:
    """Mark a message as observed only: the proxy waits for no answer."""
    request.observability_mode = True
    return request


@pytest.mark.parametrize("mode", [MODES.NONE, MODES.STREAMED, MODES.FULL_DUPLEX_STREAMED])
def test_an_observed_request_is_decided_but_neither_answered_nor_reserved(mode: int) -> None:
    bench = Bench()
    stream = bench.stream()
    assert replies(stream, shown(headers(mode=mode))) == []
    assert stream.ended is (mode == MODES.NONE)
    if mode != MODES.NONE:
        assert replies(stream, shown(body())) == []
    assert stream.ended, "it holds no stream for what it has seen"
    assert sum(bench.counted("decisions_total", endpoint=name) for name in "ab") == 1
    assert bench.reserved() == 0
    assert replies(stream, shown(response(served=A))) == []
    stream.close()
    assert bench.counted("outcomes_total", outcome="cancelled") == 1
    assert bench.troubles == []


def test_an_observed_message_is_never_answered_and_its_stream_ends_cleanly() -> None:
    bench = Bench()
    begun_before = [shown(headers(mode=MODES.STREAMED)), shown(body(b"no json"))]
    for shows in (begun_before, [shown(body())], [shown(pb.ProcessingRequest())], [shown(response())]):
        stream = bench.stream()
        assert [replies(stream, one) for one in shows] == [[]] * len(shows)
        assert stream.ended
    assert bench.counted("refusals_total", code="invalid_json") == 1
    assert bench.counted("protocol_errors_total") == 1


def test_an_invalid_message_is_an_error_of_the_reader() -> None:
    with pytest.raises(BadMessage):
        list(Bench().stream().answers(b"\x12\x05x"))
