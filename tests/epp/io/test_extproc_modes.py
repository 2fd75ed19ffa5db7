"""Exchanges under every `ProcessingMode`, with parts missing or late: one reply to each message that a proxy waits for,
bodies unchanged, and never an answer of ours in place of the engine's."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.proxy import head, replies
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.extproc.session import ExtProcSession, SessionLimits
from treeline_epp.extproc.state import BodyMode, ExtProcState, Kind, Message, Output, Reply
from treeline_epp.metrics import Metrics
from treeline_epp.picking.picker import Picker
from treeline_epp.requests.body import RouteRequest
from treeline_epp.requests.model_registry import ModelRegistry
from treeline_epp.requests.router import Router
from treeline_wire import envoy_pb2 as pb
from treeline_wire import headers as names

HEADERS = {":path": "/v1/completions", ":method": "POST", "x-request-id": "r1"}
REQUEST = (Kind.REQUEST_HEADERS, Kind.REQUEST_BODY, Kind.REQUEST_TRAILERS)
RESPONSE = (Kind.RESPONSE_HEADERS, Kind.RESPONSE_BODY, Kind.RESPONSE_TRAILERS)
DUPLEX, WHERE = BodyMode.FULL_DUPLEX_STREAMED, "10.0.0.1:8000,10.0.0.2:8000"
MODES = st.sampled_from(list(BodyMode))


def exchange(request: BodyMode = DUPLEX, response: BodyMode = BodyMode.NONE) -> ExtProcState:
    return ExtProcState(request, response, body_limit=1 << 20)


class Stream:
    """A stream to a picker over one endpoint, which serves the model `tiny`."""

    def __init__(self) -> None:
        registry, picker = ModelRegistry(), Picker()
        picker.add_endpoint(EndpointSpec("a", "10.0.0.1:8000", models=("tiny",)))
        registry.set_endpoint("a", "default", ("tiny",), None)
        self.metrics = Metrics()
        self.session = ExtProcSession(Router(picker, registry, self.metrics), SessionLimits(10_000))

    def ask(self, request: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
        return replies(self.session, request)

    def outcomes(self, outcome: str) -> float | None:
        return self.metrics.registry.get_sample_value("treeline_epp_outcomes_total", {"outcome": outcome})


@dataclass(frozen=True)
class Half:
    """One half of an exchange, and the parts of it that the proxy is configured to send."""

    headers: bool
    mode: BodyMode
    trailers: bool
    chunks: tuple[bytes, ...]
    has_trailers: bool
    made_up: bool

    def messages(self, kinds: tuple[Kind, Kind, Kind]) -> list[Message]:
        """Return the messages as Envoy sends them: the last one ends the stream, and trailers may be added after a
        body."""
        head, body, tail = kinds
        data, out = b"".join(self.chunks), []
        if self.headers:
            out.append(Message(head, not self.chunks and not self.has_trailers, headers=HEADERS))
        ends = not self.has_trailers
        if not self.chunks or self.mode is BodyMode.NONE:
            parts = []
        elif self.mode in (BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL):
            parts = [data]
        else:
            parts = list(self.chunks)
        out += [Message(body, ends and i == len(parts), data=part) for i, part in enumerate(parts, 1)]
        if self.trailers and (self.has_trailers or (self.made_up and parts)):
            out.append(Message(tail))
        return out


HALF = st.builds(
    Half,
    headers=st.booleans(),
    mode=MODES,
    trailers=st.booleans(),
    chunks=st.lists(st.binary(min_size=1, max_size=8), max_size=3).map(tuple),
    has_trailers=st.booleans(),
    made_up=st.booleans(),
).filter(lambda half: half.mode is not DUPLEX or half.trailers)  # Envoy refuses the other configuration


def replies_to(state: ExtProcState, messages: list[Message]) -> list[tuple[Message, list[Output]]]:
    seen = []
    for message in messages:
        outputs = state.receive(message)
        if outputs and isinstance(outputs[-1], RouteRequest):
            outputs = state.answer(WHERE)
        seen.append((message, outputs))
    return seen


def check(half: Half, kinds: tuple[Kind, Kind, Kind], sent: list[Message], said: list[Reply]) -> None:
    """Check the replies against the messages that the proxy sent for one half."""
    head, body, tail = kinds
    told, asked = Counter(reply.kind for reply in said), Counter(message.kind for message in sent)
    assert told[head] == asked[head]
    assert told[tail] == asked[tail]
    chunks = [reply for reply in said if reply.kind is body]
    if half.mode is not DUPLEX:
        assert told[body] == asked[body]
        assert all(reply.chunk is None for reply in chunks)
    elif asked[body]:
        assert b"".join(bytes(reply.chunk or b"") for reply in chunks) == b"".join(half.chunks)
        assert [reply.end_of_stream for reply in chunks[:-1]] == [False] * (len(chunks) - 1)
        assert chunks[-1].end_of_stream == any(message.end_of_stream for message in sent)
    else:
        assert not chunks
    order = [kinds.index(reply.kind) for reply in said]
    assert order == sorted(order), "headers, body, trailers"


@given(HALF, HALF)
@settings(derandomize=True, max_examples=600, deadline=None)
def test_every_configuration_gives_one_reply_to_each_message_that_waits_for_one(request: Half, response: Half) -> None:
    first, then = request.messages(REQUEST), response.messages(RESPONSE)
    assume(first or then)
    state = exchange(request.mode, response.mode)
    seen = replies_to(state, first + then)
    outputs = [output for _, several in seen for output in several]
    said = [output for output in outputs if isinstance(output, Reply)]
    assert said == outputs, "nothing but replies"
    check(request, REQUEST, first, [reply for reply in said if reply.kind in REQUEST])
    check(response, RESPONSE, then, [reply for reply in said if reply.kind in RESPONSE])
    buffers = request.mode in (BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL)
    hidden = buffers and request.headers and len(first) == 1 and not first[0].end_of_stream  # unseen trailers alone
    assert sum(reply.destination is not None for reply in said) == bool(first and not hidden)
    duplex = request.mode is DUPLEX
    for message, several in seen:
        if not (duplex and message.kind in REQUEST):
            assert several, f"the proxy waits for an answer to {message.kind}"


@given(HALF, HALF, st.data())
@settings(derandomize=True, max_examples=400, deadline=None)
def test_an_upstream_that_answers_early_gets_the_same_replies(
    request: Half, response: Half, data: st.DataObject
) -> None:
    """The upstream may answer once it has the request's headers, before the body has ended."""
    first, then = request.messages(REQUEST), response.messages(RESPONSE)
    free = request.mode in (BodyMode.NONE, BodyMode.STREAMED, BodyMode.GRPC) or not request.headers
    assume(free and first and then)
    earliest = 1 if request.headers else 0
    places = sorted(data.draw(st.lists(st.integers(earliest, len(first)), min_size=len(then), max_size=len(then))))
    merged = list(first)
    for at, message in reversed(list(zip(places, then, strict=True))):
        merged.insert(at, message)
    seen = replies_to(exchange(request.mode, response.mode), merged)
    said = [output for _, several in seen for output in several if isinstance(output, Reply)]
    assert len(said) == sum(len(several) for _, several in seen)
    check(request, REQUEST, first, [reply for reply in said if reply.kind in REQUEST])
    check(response, RESPONSE, then, [reply for reply in said if reply.kind in RESPONSE])


@pytest.mark.parametrize("mode", list(BodyMode))
def test_a_body_before_its_headers_is_tolerated_in_both_halves(mode: BodyMode) -> None:
    state = exchange(mode, mode)
    late = [
        Message(Kind.REQUEST_BODY, True, data=b"{}"),
        Message(Kind.REQUEST_HEADERS, headers=HEADERS),
        Message(Kind.RESPONSE_BODY, True, data=b"x"),
        Message(Kind.RESPONSE_HEADERS),
    ]
    said = [reply for _, several in replies_to(state, late) for reply in several if isinstance(reply, Reply)]
    assert [reply.kind for reply in said] == [message.kind for message in late]
    assert [reply.destination for reply in said] == [WHERE, WHERE, None, None]


def test_headers_in_the_middle_of_a_full_duplex_body_are_answered_with_the_choice() -> None:
    state = exchange()
    assert state.receive(Message(Kind.REQUEST_BODY, data=b"a")) == []
    assert state.receive(Message(Kind.REQUEST_HEADERS, headers=HEADERS)) == []
    assert state.receive(Message(Kind.REQUEST_BODY, True, data=b"b")) == [RouteRequest(HEADERS, b"ab", None)]
    assert state.answer(WHERE) == [
        Reply(Kind.REQUEST_HEADERS, destination=WHERE, content_length=2),
        Reply(Kind.REQUEST_BODY, chunk=b"ab", end_of_stream=True),
    ]


@pytest.mark.parametrize("mode", [BodyMode.STREAMED, BodyMode.NONE])
def test_a_body_is_not_resized_after_its_headers_were_forwarded(mode: BodyMode) -> None:
    state = exchange(mode)
    assert state.receive(Message(Kind.REQUEST_BODY, True, data=b"{}")) == [RouteRequest({}, b"{}", None)]
    assert state.answer(WHERE, b"longer") == [Reply(Kind.REQUEST_BODY, destination=WHERE)]


def on_the_wire(mode: BodyMode, message: Message) -> pb.ProcessingRequest:
    request = pb.ProcessingRequest()
    request.protocol_config.request_body_mode = mode.value
    request.protocol_config.response_body_mode = pb.ProcessingMode.NONE
    part = getattr(request, message.kind.value)
    part.SetInParent()
    if message.kind in (Kind.REQUEST_BODY, Kind.RESPONSE_BODY):
        part.body, part.end_of_stream = bytes(message.data), message.end_of_stream
    return request


@pytest.mark.parametrize("mode", [BodyMode.BUFFERED, BodyMode.STREAMED, DUPLEX])
def test_without_request_headers_the_body_alone_decides(mode: BodyMode) -> None:
    stream = Stream()
    body = b'{"model": "tiny", "prompt": "hello"}'
    (reply,) = stream.ask(on_the_wire(mode, Message(Kind.REQUEST_BODY, True, data=body)))
    assert reply.dynamic_metadata[names.LB][names.DESTINATION]
    streamed = reply.request_body.response.body_mutation.streamed_response
    assert streamed.body == (body if mode is DUPLEX else b"")
    (reply,) = stream.ask(on_the_wire(mode, Message(Kind.RESPONSE_BODY, True, data=b"x")))
    assert reply.WhichOneof("response") == "response_body"
    assert stream.outcomes("headers") == 1, "the response has begun"
    stream.session.close()
    assert stream.outcomes("headers") == 1


def test_an_unknown_model_is_refused_without_headers_too() -> None:
    body = Message(Kind.REQUEST_BODY, True, data=b'{"model": "nobody", "messages": []}')
    (reply,) = Stream().ask(on_the_wire(BodyMode.BUFFERED, body))
    assert reply.immediate_response.status.code == 404


@pytest.mark.parametrize("data", [b"", b"not json", b"[]", b'{"prompt": 1}'])
def test_a_body_without_a_prompt_is_routed_by_load(data: bytes) -> None:
    (reply,) = Stream().ask(on_the_wire(BodyMode.BUFFERED, Message(Kind.REQUEST_BODY, True, data=data)))
    assert reply.dynamic_metadata[names.LB][names.DESTINATION]


@pytest.mark.parametrize("method", ["OPTIONS", "HEAD", "GET", "DELETE", "PUT"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate", "/v1/responses"])
@pytest.mark.parametrize("mode", [BodyMode.BUFFERED, BodyMode.NONE, DUPLEX])
def test_only_a_post_needs_a_body(method: str, path: str, mode: BodyMode) -> None:
    for end in (True, False):  # nothing follows, or trailers alone do
        stream = Stream()
        answers = stream.ask(head({":path": path, ":method": method}, mode.value, end=end))
        if not end:
            answers += stream.ask(on_the_wire(mode, Message(Kind.REQUEST_TRAILERS)))
        assert not any(answer.HasField("immediate_response") for answer in answers)
        assert sum(bool(answer.dynamic_metadata) for answer in answers) == 1


def test_the_body_of_a_get_is_not_read_as_a_prompt() -> None:
    stream = Stream()
    stream.ask(head({":path": "/v1/completions", ":method": "GET"}))
    (reply,) = stream.ask(on_the_wire(BodyMode.BUFFERED, Message(Kind.REQUEST_BODY, True, data=b"no json")))
    assert reply.dynamic_metadata[names.LB][names.DESTINATION]
