"""The effect of a picker's answers in Envoy, without sockets."""

from __future__ import annotations

from typing import Any

from google.protobuf import struct_pb2
from hypothesis import given, settings
from hypothesis import strategies as st
from treeline_conformance.messages import DESTINATION, LB, Mode, in_chunks, shown, transcript
from treeline_conformance.reading import CHUNK_LIMIT, RequestReading
from treeline_wire import envoy_pb2 as pb

WHERE = "10.0.0.1:8000,10.0.0.2:8000"
BODIES = st.lists(st.binary(max_size=40), min_size=1, max_size=6)


def with_destination(kind: str, where: str = WHERE) -> Any:
    response = pb.ProcessingResponse()
    common = getattr(response, kind).response
    header = pb.HeaderValue(key="X-Gateway-Destination-Endpoint", raw_value=where.encode())
    common.header_mutation.set_headers.append(pb.HeaderValueOption(header=header))
    response.dynamic_metadata.fields[LB].struct_value.fields[DESTINATION].string_value = where
    return response


def chunk(data: bytes, end: bool = False) -> Any:
    response = pb.ProcessingResponse()
    streamed = response.request_body.response.body_mutation.streamed_response
    streamed.body, streamed.end_of_stream = data, end
    return response


def plain(kind: str) -> Any:
    response = pb.ProcessingResponse()
    getattr(response, kind).SetInParent()
    return response


def read(mode: Mode, answers: list[Any], *, sent: int, trailers: bool = False) -> tuple[RequestReading, list[bool]]:
    """Return the reading, and whether it was complete before and after each answer."""
    reading = RequestReading(mode, has_body=sent > 0, trailers=trailers, sent_chunks=sent)
    complete = [reading.complete()]
    for answer in answers:
        reading.take(answer)
        complete.append(reading.complete())
    return reading, complete


@given(BODIES, st.booleans())
@settings(derandomize=True, deadline=None)
def test_full_duplex_gives_the_body_and_is_complete_with_its_last_answer(parts: list[bytes], trailers: bool) -> None:
    chunks = [chunk(part, end=not trailers and at == len(parts)) for at, part in enumerate(parts, 1)]
    answers = [with_destination("request_headers"), *chunks, *([plain("request_trailers")] if trailers else [])]
    reading, complete = read(Mode.DUPLEX, answers, sent=3, trailers=trailers)
    assert complete == [False] * len(answers) + [True]
    assert reading.faults == {}
    assert reading.body(b"sent") == b"".join(parts)
    assert (reading.header, reading.metadata, reading.eos) == (WHERE, WHERE, 0 if trailers else 1)


def test_in_other_modes_each_message_has_its_answer_and_headers_count_where_envoy_reads_them() -> None:
    late, complete = read(Mode.STREAMED, [plain("request_headers"), with_destination("request_body")], sent=1)
    assert complete == [False, False, True]
    assert late.header is None
    assert "late_header" in late.faults
    buffered, _ = read(Mode.BUFFERED, [plain("request_headers"), with_destination("request_body")], sent=1)
    assert (buffered.header, buffered.faults) == (WHERE, {})
    none, complete = read(Mode.NONE, [with_destination("request_headers")], sent=1)
    assert complete == [False, True]
    assert none.body(b"sent") == b"sent"


def test_a_body_that_is_replaced_or_removed_is_what_the_upstream_gets() -> None:
    replaced, removed = with_destination("request_body"), with_destination("request_body")
    replaced.request_body.response.body_mutation.body = b"other"
    removed.request_body.response.body_mutation.clear_body = True
    for answer, expected in ((replaced, b"other"), (removed, b""), (with_destination("request_body"), b"sent")):
        reading, _ = read(Mode.BUFFERED, [plain("request_headers"), answer], sent=1)
        assert reading.body(b"sent") == expected


def test_each_broken_rule_is_recorded_by_name() -> None:
    first = with_destination("request_headers")
    by_value = with_destination("request_headers")
    option = by_value.request_headers.response.header_mutation.set_headers[0]
    option.header.value, option.header.raw_value = WHERE, b""
    appended = with_destination("request_headers")
    appended.request_headers.response.header_mutation.set_headers[0].append.value = True
    number = with_destination("request_headers")
    number.dynamic_metadata.fields[LB].struct_value.fields[DESTINATION].CopyFrom(struct_pb2.Value(number_value=7))
    refusal = pb.ProcessingResponse()
    refusal.immediate_response.status.code = 503
    broken = {
        "order": [chunk(b"x", end=True), first],
        "eos": [first, chunk(b"x", end=True), chunk(b"", end=True)],
        "chunk": [first, chunk(b"x" * (CHUNK_LIMIT + 1), end=True)],
        "streamed": [first, plain("request_body")],
        "raw_value": [by_value],
        "append": [appended],
        "metadata": [number],
        "immediate": [refusal, first],
    }
    for rule, answers in broken.items():
        assert set(read(Mode.DUPLEX, answers, sent=1)[0].faults) == {rule}
    assert set(read(Mode.DUPLEX, [first, first], sent=1)[0].faults) == {"order"}
    assert set(read(Mode.DUPLEX, [plain("response_headers")], sent=1)[0].faults) == {"order"}
    assert set(read(Mode.STREAMED, [first, chunk(b"x")], sent=1)[0].faults) == {"streamed"}


@given(st.binary(max_size=300), st.integers(min_value=1, max_value=50))
@settings(derandomize=True, deadline=None)
def test_the_pieces_of_a_body_add_up_to_it(data: bytes, size: int) -> None:
    pieces = in_chunks(data, size)
    assert b"".join(pieces) == data
    assert all(0 < len(piece) <= size for piece in pieces) or pieces == [b""]


def test_an_exchange_is_shown_with_texts_and_bounded_in_size() -> None:
    message = pb.ProcessingRequest(request_body=pb.HttpBody(body=b"\xff" + b"x" * 100_000, end_of_stream=True))
    entry = shown(message)
    assert entry["long_body"]["bytes"] == 100_001
    assert entry["request_body"]["body"].startswith("\\xffxxx")
    assert shown(with_destination("request_headers"))["request_headers"]["response"]["header_mutation"]["set_headers"][
        0
    ] == {"header": {"key": "X-Gateway-Destination-Endpoint", "raw_value": WHERE}}
    odd = with_destination("request_headers")
    odd.dynamic_metadata.fields["x"].CopyFrom(struct_pb2.Value(number_value=float("nan")))
    assert "NaN" in shown(odd)["no_json"]
    many = transcript([("proxy", message)] * 1_000 + [("picker", "ended")])
    assert len(many) == 9
    assert many[-1] == {"who": "picker", "said": "ended"}
