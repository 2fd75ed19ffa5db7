"""The ext_proc state machine: every body mode, every order of messages, any chunking."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treeline_epp.extproc.state import (
    REQUEST_TRANSITIONS,
    RESPONSE_TRANSITIONS,
    BodyMode,
    ExtProcState,
    Kind,
    Message,
    OutOfOrder,
    Output,
    Reply,
    RequestPhase,
    ResponsePhase,
)
from treeline_epp.requests import refusals
from treeline_epp.requests.body import CHUNK_BYTES, Immediate, RouteRequest

DUPLEX = BodyMode.FULL_DUPLEX_STREAMED
WHERE = "10.0.0.1:8000,10.0.0.2:8000"
HEADERS = {":path": "/v1/completions", "x-request-id": "r1"}


def exchange(request: BodyMode = DUPLEX, response: BodyMode = BodyMode.NONE, limit: int = 1 << 20) -> ExtProcState:
    return ExtProcState(request, response, body_limit=limit)


def head(*, end: bool = False) -> Message:
    return Message(Kind.REQUEST_HEADERS, end, headers=HEADERS)


def body(data: bytes = b"", *, end: bool = False) -> Message:
    return Message(Kind.REQUEST_BODY, end, data=data)


TRAILERS = Message(Kind.REQUEST_TRAILERS)


@pytest.mark.parametrize(
    ("mode", "messages", "shown"),
    [
        (BodyMode.BUFFERED, [body(b"{}")], b"{}"),
        (BodyMode.BUFFERED, [TRAILERS], b""),
        (BodyMode.BUFFERED_PARTIAL, [body(b'{"mod')], None),
        (DUPLEX, [body(b"a"), body(b"bc"), TRAILERS], b"abc"),
        (DUPLEX, [TRAILERS], b""),
    ],
    ids=["its body is whole", "no body", "a part is not shown", "a body in pieces", "no body in pieces"],
)
def test_a_request_is_decided_before_its_trailers(mode: BodyMode, messages: list[Message], shown: bytes | None) -> None:
    x = exchange(mode)
    x.receive(head())
    outputs = [output for message in messages for output in x.receive(message)]
    assert outputs[-1] == RouteRequest(HEADERS, shown, None)


@pytest.mark.parametrize("mode", list(BodyMode))
def test_without_a_body_every_mode_decides_at_the_headers(mode: BodyMode) -> None:
    x = exchange(mode)
    assert x.receive(head(end=True)) == [RouteRequest(HEADERS, b"", None)]
    assert x.answer(WHERE) == [Reply(Kind.REQUEST_HEADERS, destination=WHERE)]
    assert x.request_phase is RequestPhase.DONE


def test_a_repeated_end_of_a_long_body_is_ignored() -> None:
    x = exchange()
    x.receive(head())
    x.receive(body(b"abc", end=True))
    x.answer(WHERE)
    assert x.receive(body(b"c", end=True)) == []
    assert x.receive(body(b"", end=True)) == []
    assert x.receive(Message(Kind.RESPONSE_HEADERS)) == [Reply(Kind.RESPONSE_HEADERS)]


def test_subset_is_read_from_whichever_message_carries_it() -> None:
    for on_headers in (True, False):
        subset = frozenset({"10.0.0.1:8000"})
        x = exchange(BodyMode.BUFFERED)
        x.receive(Message(Kind.REQUEST_HEADERS, headers=HEADERS, subset=subset if on_headers else None))
        message = Message(Kind.REQUEST_BODY, True, data=b"{}", subset=None if on_headers else subset)
        assert x.receive(message) == [RouteRequest(HEADERS, b"{}", subset)]


@pytest.mark.parametrize("mode", [BodyMode.BUFFERED, DUPLEX])
def test_a_body_over_the_limit_is_answered_413(mode: BodyMode) -> None:
    x = exchange(mode, limit=10)
    x.receive(head())
    if mode is DUPLEX:
        assert x.receive(body(b"12345678")) == []
    (reply,) = x.receive(body(b"12345678901"))
    assert isinstance(reply, Immediate)
    assert reply.status == 413
    assert x.closed
    assert x.receive(body(b"more", end=True)) == []


def test_an_announced_body_over_the_limit_is_answered_before_it_is_sent() -> None:
    x = exchange(BodyMode.BUFFERED, limit=10)
    (reply,) = x.receive(Message(Kind.REQUEST_HEADERS, headers={**HEADERS, "content-length": "11"}))
    assert isinstance(reply, Immediate)
    assert reply.status == 413


def test_response_bodies_are_echoed_unread_in_full_duplex_and_left_alone_otherwise() -> None:
    x = exchange(response=DUPLEX)
    x.receive(head(end=True))
    x.answer(WHERE)
    x.receive(Message(Kind.RESPONSE_HEADERS))
    data = b"x" * (CHUNK_BYTES + 1)
    assert x.receive(Message(Kind.RESPONSE_BODY, data=data)) == [
        Reply(Kind.RESPONSE_BODY, chunk=data[:CHUNK_BYTES]),
        Reply(Kind.RESPONSE_BODY, chunk=b"x"),
    ]
    assert x.receive(Message(Kind.RESPONSE_BODY, True)) == [Reply(Kind.RESPONSE_BODY, chunk=b"", end_of_stream=True)]
    assert x.receive(Message(Kind.RESPONSE_BODY, True, data=b"again")) == []

    y = exchange(response=BodyMode.STREAMED)
    y.receive(head(end=True))
    y.answer(WHERE)
    y.receive(Message(Kind.RESPONSE_HEADERS))
    assert y.receive(Message(Kind.RESPONSE_BODY, data=b"abc")) == [Reply(Kind.RESPONSE_BODY)]
    assert y.receive(Message(Kind.RESPONSE_TRAILERS)) == [Reply(Kind.RESPONSE_TRAILERS)]


@pytest.mark.parametrize(("response", "finished"), [(BodyMode.NONE, True), (BodyMode.STREAMED, False), (DUPLEX, False)])
def test_an_exchange_without_a_response_body_ends_with_the_response_headers(response: BodyMode, finished: bool) -> None:
    x = exchange(response=response)
    x.receive(head(end=True))
    assert not x.finished
    x.answer(WHERE)
    assert not x.finished
    x.receive(Message(Kind.RESPONSE_HEADERS))
    assert x.finished is finished


def test_a_response_before_the_decision_abandons_it() -> None:
    x = exchange()
    x.receive(head())
    x.receive(body(b"half"))
    assert x.receive(Message(Kind.RESPONSE_HEADERS, True)) == [Reply(Kind.RESPONSE_HEADERS)]
    assert x.receive(body(b"rest", end=True)) == []
    assert x.request_phase is RequestPhase.ABANDONED


@pytest.mark.parametrize(
    "illegal",
    [
        [head(), head()],
        [body(b"x"), head(), head()],
        [Message(Kind.REQUEST_TRAILERS), Message(Kind.REQUEST_TRAILERS)],
        [Message(Kind.RESPONSE_HEADERS), head()],
        [Message(Kind.RESPONSE_HEADERS), Message(Kind.RESPONSE_HEADERS)],
        [Message(Kind.RESPONSE_HEADERS), Message(Kind.RESPONSE_TRAILERS), Message(Kind.RESPONSE_TRAILERS)],
    ],
)
def test_illegal_order_is_a_typed_error_that_closes_the_exchange(illegal: list[Message]) -> None:
    x = exchange()
    for message in illegal[:-1]:
        x.receive(message)
    with pytest.raises(OutOfOrder) as error:
        x.receive(illegal[-1])
    assert error.value.status == 500
    assert x.closed
    assert x.receive(head()) == []


def test_an_unrequested_decision_is_a_bug_of_the_caller() -> None:
    with pytest.raises(RuntimeError, match="without a RouteRequest"):
        exchange().answer(WHERE)


def test_the_tables_know_every_phase_and_lead_only_to_phases() -> None:
    assert set(REQUEST_TRANSITIONS) == set(RequestPhase) - {RequestPhase.CLOSED}
    assert set(RESPONSE_TRANSITIONS) == set(ResponsePhase)


# --- invariants -------------------------------------------------------------------------------------------------------


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(c % (len(data) + 1) for c in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@settings(deadline=None)
@given(data=st.binary(max_size=400), cuts=st.lists(st.integers(0, 400), max_size=8), late_end=st.booleans())
def test_any_chunking_gives_the_same_decision_and_returns_the_same_body(
    data: bytes, cuts: list[int], late_end: bool
) -> None:
    x = exchange()
    x.receive(head())
    messages = [body(part) for part in split(data, cuts)]
    messages = [*messages, body(end=True)] if late_end else [*messages[:-1], body(messages[-1].data, end=True)]
    outputs = [action for message in messages for action in x.receive(message)]
    assert outputs == [RouteRequest(HEADERS, data, None)]
    replies = [r for r in x.answer(WHERE) if isinstance(r, Reply)]
    assert replies[0] == Reply(Kind.REQUEST_HEADERS, destination=WHERE, content_length=len(data))
    assert b"".join(r.chunk or b"" for r in replies[1:]) == data
    assert [r.end_of_stream for r in replies[1:]] == [False] * (len(replies) - 2) + [True]


MESSAGES = st.builds(
    Message,
    kind=st.sampled_from(list(Kind)),
    end_of_stream=st.booleans(),
    headers=st.just(HEADERS),
    data=st.binary(max_size=12),
)


REQUEST_KINDS = {Kind.REQUEST_HEADERS, Kind.REQUEST_BODY, Kind.REQUEST_TRAILERS}


def complain(outputs: list[Output], message: Message, x: ExtProcState) -> None:
    """Check the outputs' invariants after a message."""
    decides = [a for a in outputs if isinstance(a, RouteRequest)]
    assert len(decides) <= 1
    assert not decides or outputs[-1] is decides[0]
    assert (x.request_phase is RequestPhase.DECIDING) == bool(decides)
    # A response that comes early: the part of a body that was kept goes back, before the answer to the response.
    early = x.request_phase is RequestPhase.ABANDONED and message.kind not in REQUEST_KINDS
    given_back = list(itertools.takewhile(lambda a: isinstance(a, Reply) and a.kind is Kind.REQUEST_BODY, outputs))
    for action in outputs[len(given_back) if early else 0 :]:
        if isinstance(action, Reply):
            assert action.kind is message.kind or message.kind is Kind.REQUEST_TRAILERS


@settings(deadline=None)
@given(
    request=st.sampled_from(list(BodyMode)),
    response=st.sampled_from(list(BodyMode)),
    messages=st.lists(MESSAGES, max_size=12),
    refuses=st.booleans(),
)
def test_no_order_of_messages_raises_anything_but_the_typed_error(
    request: BodyMode, response: BodyMode, messages: list[Message], refuses: bool
) -> None:
    x = exchange(request, response, limit=30)
    destinations = 0
    for message in messages:
        try:
            outputs = x.receive(message)
        except OutOfOrder:
            assert x.closed
            continue
        complain(outputs, message, x)
        if outputs and isinstance(outputs[-1], RouteRequest):
            replies = x.refuse(refusals.internal_error()) if refuses else x.answer(WHERE)
            destinations += sum(isinstance(r, Reply) and r.destination == WHERE for r in replies)
            assert refuses == x.closed
    assert destinations <= 1


def test_a_body_without_headers_goes_back_when_the_response_comes_before_its_end() -> None:
    x = exchange()
    assert x.receive(body(b"begin")) == []
    assert x.receive(Message(Kind.RESPONSE_HEADERS)) == [
        Reply(Kind.REQUEST_BODY, chunk=b"begin"),
        Reply(Kind.RESPONSE_HEADERS),
    ]
