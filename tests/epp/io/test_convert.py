"""Messages as bytes: what is read of them, and answers with the bytes that protobuf writes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from google.protobuf.message import DecodeError
from treeline_epp.extproc.convert import USED_HEADERS, Reader, UnknownMessage, to_response
from treeline_epp.extproc.state import BodyMode, Kind, Message, Reply
from treeline_epp.protowire import field
from treeline_epp.requests.body import Body
from treeline_wire import envoy_pb2 as pb
from treeline_wire import headers as names

ENVOY_HEADERS = [
    (":authority", "127.0.0.1:8080"),
    (":path", "/v1/chat/completions"),
    (":method", "POST"),
    ("user-agent", "OpenAI/Python"),
    ("authorization", "Bearer " + "k" * 200),
    ("x-request-id", "r1"),
    ("x-treeline-client", "é"),
    ("content-length", ""),
]


def header_list(request: pb.ProcessingRequest, part: str, pairs: list[tuple[str, str]]) -> pb.ProcessingRequest:
    message = getattr(request, part)
    message.SetInParent()
    found = message.trailers if part.endswith("trailers") else message.headers
    for key, value in pairs:
        found.headers.add(key=key, raw_value=value.encode("latin-1"))
    return request


READER = Reader()


def envoys_messages() -> dict[str, pb.ProcessingRequest]:
    """Draw one message of each kind, as Envoy writes them."""
    head = header_list(pb.ProcessingRequest(), "request_headers", ENVOY_HEADERS)
    head.protocol_config.request_body_mode = 2
    hint = head.metadata_context.filter_metadata[names.LB_SUBSET].fields[names.SUBSET].list_value
    hint.values.add(string_value="10.0.0.1:8000")
    bare = header_list(pb.ProcessingRequest(), "request_headers", ENVOY_HEADERS)
    bare.request_headers.end_of_stream = True
    answer = header_list(pb.ProcessingRequest(), "response_headers", [(":status", "200"), ("server", "x")])
    answer.metadata_context.filter_metadata[names.LB].fields[names.SERVED].string_value = "10.0.0.1:8000"
    shown = pb.ProcessingRequest(observability_mode=True, response_body=pb.HttpBody(body=b"data: x\n\n"))
    return {
        "request headers": head,
        "no body": bare,
        "small body": pb.ProcessingRequest(request_body=pb.HttpBody(body=b"{}", end_of_stream=True)),
        "large body": pb.ProcessingRequest(request_body=pb.HttpBody(body=b"x" * 300_000)),
        "empty body": pb.ProcessingRequest(request_body=pb.HttpBody(end_of_stream=True)),
        "request trailers": header_list(pb.ProcessingRequest(), "request_trailers", [("grpc-status", "0")]),
        "response headers": answer,
        "observed chunk": shown,
        "response trailers": header_list(pb.ProcessingRequest(), "response_trailers", []),
    }


def test_header_values_are_read_as_sent() -> None:
    messages = {name: READER.read(request.SerializeToString()) for name, request in envoys_messages().items()}
    head = messages["request headers"]
    assert head.headers[":path"] == "/v1/chat/completions"
    assert (head.headers["x-treeline-client"], head.headers["content-length"]) == ("é", "")
    assert "authorization" not in head.headers
    assert head.subset == {"10.0.0.1:8000"}
    assert head.modes == (2, 0)
    assert messages["response headers"].served == "10.0.0.1:8000"
    assert len(messages["large body"].data) == 300_000
    assert messages["empty body"] == Message(Kind.REQUEST_BODY, end_of_stream=True)
    assert messages["request trailers"] == Message(Kind.REQUEST_TRAILERS)
    assert [name for name, message in messages.items() if message.observed] == ["observed chunk"]


def test_a_field_that_comes_twice_or_is_unknown_is_read_as_protobuf_says() -> None:
    head, more = pb.ProcessingRequest(), pb.ProcessingRequest()
    more.attributes["a"].fields["b"].string_value = "c"
    header_list(head, "request_headers", [("x-session-id", "a"), ("cookie", "c"), ("x-session-id", "b")])
    head.protocol_config.request_body_mode = 77
    message = READER.read(head.SerializeToString() + more.SerializeToString())
    assert message.headers == {"x-session-id": "b"}
    assert message.modes == (BodyMode.NONE, BodyMode.NONE)
    with pytest.raises(UnknownMessage):
        READER.read(more.SerializeToString())


def nested(depth: int) -> bytes:
    """Return metadata with lists within lists."""
    value = field(3, b"x")
    for _ in range(depth):
        value = field(6, field(1, value))
    return field(8, field(1, field(1, b"envoy.lb") + field(2, field(1, field(1, b"k") + field(2, value)))))


BODY = field(4, field(1, b"{}"))


@pytest.mark.parametrize(
    "data",
    [
        field(2, field(1, field(1, field(1, b"\xff\xfe")))),
        field(2, field(1, field(1, field(1, b"key"))))[:-1],
        BODY + b"\x50" + b"\x80" * 15 + b"\x01",
        BODY + b"\x02\x01a",
        BODY + b"\x0b",
        nested(60) + BODY,
        nested(20_000) + BODY,
    ],
    ids=["no-utf8", "cut", "endless-number", "field-0", "open-group", "deep", "very-deep"],
)
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        READER.read(data)


def test_a_field_of_another_type_is_treated_as_unknown() -> None:
    assert READER.read(b"\x10\x01" + BODY) == READER.read(BODY)


def test_every_header_that_the_picker_asks_for_is_converted() -> None:
    """Code that looks at a header outside the list would never see it."""
    asked: set[str] = set()
    for folder in ("extproc", "requests"):
        for path in Path(f"epp/src/treeline_epp/{folder}").glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("headers.get"):
                    asked |= _names(node.args[0])
                elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]).endswith("headers"):
                    asked |= _names(node.left)
                elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("headers"):
                    asked |= _names(node.slice)
    assert {":path", ":method", names.REQUEST_ID, names.OVERLOADED, "content-length"} <= asked
    assert asked <= USED_HEADERS


def _names(node: ast.expr) -> set[str]:
    """Return the name of a header in source code: a text, or a name of `treeline_wire.headers`. A variable is
    unknown."""
    if isinstance(node, ast.Constant):
        return {str(node.value)}
    return {str(getattr(names, node.attr))} if isinstance(node, ast.Attribute) else set()


def built(reply: Reply) -> bytes:
    """Return the same answer by protobuf's classes."""
    response = pb.ProcessingResponse()
    if reply.destination is not None:
        chosen = response.dynamic_metadata.fields[names.LB].struct_value
        chosen.fields[names.DESTINATION].string_value = reply.destination
    part = getattr(response, reply.kind.value)
    part.SetInParent()
    if reply.kind.value.endswith("trailers"):
        return response.SerializeToString()
    set_headers: list[tuple[str, bytes]] = []
    if reply.destination is not None:
        set_headers.append((names.DESTINATION, reply.destination.encode()))
        part.response.clear_route_cache = True
    if reply.content_length is not None:
        set_headers.append(("content-length", b"%d" % reply.content_length))
    set_headers += [(key, value.encode()) for key, value in reply.added if value is not None]
    for key, value in set_headers:
        header = pb.HeaderValue(key=key, raw_value=value)
        action = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
        part.response.header_mutation.set_headers.add(header=header, append_action=action)
    for key, value in reply.added:
        if value is None:
            part.response.header_mutation.remove_headers.append(key)
    if reply.body is not None:
        whole = reply.body if isinstance(reply.body, bytes) else reply.body.joined()
        part.response.body_mutation.body = whole
    if reply.chunk is not None:
        part.response.body_mutation.streamed_response.body = bytes(reply.chunk)
        part.response.body_mutation.streamed_response.end_of_stream = reply.end_of_stream
    return response.SerializeToString()


ADDED: list[tuple[tuple[str, str | None], ...]] = [
    (),
    (("traceparent", "00-1-2-01"), ("tracestate", "a=b")),
    ((names.RANK, None), ("traceparent", "00-1-2-01")),
]
SIZES = [0, 1, 100, 127, 128, 5_000, 62_000]


@pytest.mark.parametrize("kind", Kind)
def test_answers_have_the_bytes_that_protobuf_writes(kind: Kind) -> None:
    assert to_response(Reply(kind)) == built(Reply(kind))
    for destination in (None, "10.0.0.1:8000", "[::1]:1," + "10.0.0.1:8000," * 20):
        for length in (None, 0, 123456):
            for body in (None, b"", b"x" * 200, Body(), Body([b"ab", memoryview(b"c" * 200_000)])):
                for added in ADDED if destination else ((),):
                    reply = Reply(kind, destination=destination, content_length=length, body=body, added=added)
                    assert to_response(reply) == built(reply), reply


@pytest.mark.parametrize("kind", [Kind.REQUEST_BODY, Kind.RESPONSE_BODY])
def test_chunks_have_the_bytes_that_protobuf_writes_around_them(kind: Kind) -> None:
    for size in SIZES:
        for chunk in (b"x" * size, memoryview(b"y" * size)):
            for end in (False, True):
                reply = Reply(kind, chunk=chunk, end_of_stream=end)
                assert to_response(reply) == built(reply)


def test_headers_for_the_picker_alone_are_removed_if_configured() -> None:
    data = to_response(Reply(Kind.RESPONSE_HEADERS), strip_response_headers=True)
    mutation = pb.ProcessingResponse.FromString(data).response_headers.response.header_mutation
    assert list(mutation.remove_headers) == [names.CACHED_TOKENS, names.PROMPT_TOKENS]
    assert to_response(Reply(Kind.REQUEST_HEADERS), strip_response_headers=True) == b"\x0a\x00"
