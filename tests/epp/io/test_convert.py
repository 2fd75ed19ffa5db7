"""Messages as bytes: our reader and writer, which avoid protobuf's objects, agree with protobuf."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from google.protobuf import struct_pb2
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from treeline_epp.extproc import wire_reader
from treeline_epp.extproc.convert import Reader, UnknownMessage, to_response
from treeline_epp.extproc.state import Kind, Message, Reply
from treeline_epp.extproc.wire_reader import USED_HEADERS
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
WIRE = READER._wire


def as_read(data: bytes) -> Message | str:
    """Read a message twice, since the reader may remember the first reading."""
    try:
        first, again = comparable(READER.read(data)), comparable(READER.read(data))
        assert again == first
        return first
    except (DecodeError, UnknownMessage) as error:
        return f"{type(error).__name__}: {error}"


def as_protobuf_reads(data: bytes) -> Message | str:
    try:
        return comparable(READER.read_by_protobuf(data))
    except (DecodeError, UnknownMessage) as error:
        return f"{type(error).__name__}: {error}"


def comparable(message: Message) -> Message:
    return Message(
        message.kind, message.end_of_stream, dict(message.headers), bytes(message.data), message.subset,
        message.pool, message.served, message.modes, message.observed,
    )  # fmt: skip


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


@pytest.mark.parametrize("name", envoys_messages())
def test_envoys_messages_are_read_without_protobuf_and_equally(name: str) -> None:
    data = envoys_messages()[name].SerializeToString()
    quick = WIRE.read(data)
    assert quick is not None
    assert comparable(quick) == as_protobuf_reads(data)


def test_header_values_are_read_as_sent() -> None:
    messages = {name: READER.read(request.SerializeToString()) for name, request in envoys_messages().items()}
    head = messages["request headers"]
    assert head.headers[":path"] == "/v1/chat/completions"
    assert (head.headers["x-treeline-client"], head.headers["content-length"]) == ("é", "")
    assert "authorization" not in head.headers
    assert head.subset == {"10.0.0.1:8000"}
    assert head.modes == (2, 0)
    assert messages["response headers"].served == "10.0.0.1:8000"
    assert isinstance(messages["large body"].data, memoryview)
    assert [name for name, message in messages.items() if message.observed] == ["observed chunk"]


def test_remembered_header_lists_are_bounded_and_hold_no_keys() -> None:
    for number in range(wire_reader._REMEMBERED_ENTRIES + 10):
        pairs = [("authorization", f"Bearer {number}"), ("x-forwarded-for", f"10.0.0.{number}"), ("x" * 99, "y" * 99)]
        message = READER.read(header_list(pb.ProcessingRequest(), "request_headers", pairs).SerializeToString())
        assert message.headers == {"x-forwarded-for": f"10.0.0.{number}"}
    assert 0 < len(WIRE._known) <= wire_reader._REMEMBERED_ENTRIES
    assert not any(b"Bearer" in entry or b"yyy" in entry for entry in WIRE._known)


HEADER_VALUES = st.builds(
    lambda key, value, raw: pb.HeaderValue(key=key, value=value, raw_value=raw),
    st.sampled_from([*sorted(USED_HEADERS), "cookie", "é", "", "k" * 130]),
    st.sampled_from(["", "", "", "v", "é"]),
    st.sampled_from([b"", b"v", b"\xff", b"x" * 200]),
)
BODIES = st.builds(
    lambda size, ends, more: pb.HttpBody(body=b"b" * size, end_of_stream=ends, grpc_message_compressed=more),
    st.sampled_from([0, 1, 127, 128, 20_000, 270_000]),
    st.booleans(),
    st.sampled_from([False, False, False, True]),
)


@st.composite
def one_field(draw: st.DrawFn) -> bytes:
    """Draw a serialized `ProcessingRequest` with one field, or other bytes in its place."""
    request = pb.ProcessingRequest()
    match draw(st.integers(0, 9)):
        case 0 | 1:
            part = draw(st.sampled_from(["request_headers", "response_headers", "request_trailers"]))
            header_list(request, part, [])
            filled = getattr(request, part)
            fields = filled.trailers if part.endswith("trailers") else filled.headers
            fields.headers.extend(draw(st.lists(HEADER_VALUES, max_size=4)))
            if part.endswith("headers") and draw(st.booleans()):
                filled.end_of_stream = True
        case 2 | 3:
            getattr(request, draw(st.sampled_from(["request_body", "response_body"]))).CopyFrom(draw(BODIES))
        case 4:
            space = request.metadata_context.filter_metadata[draw(st.sampled_from([names.LB, names.LB_SUBSET, "x"]))]
            key = draw(st.sampled_from([names.SERVED, names.SUBSET, names.POOL_METADATA]))
            space.fields[key].string_value = draw(st.sampled_from(["", "10.0.0.1:8000", "é" * 1200]))
        case 5:
            space = request.metadata_context.filter_metadata[names.LB_SUBSET]
            number = struct_pb2.Value(number_value=draw(st.sampled_from([1.0, float("nan")])))
            space.fields[names.SUBSET].CopyFrom(number)
        case 6:
            request.protocol_config.request_body_mode = draw(st.sampled_from([0, 2, 4, 77]))
        case 7:
            request.observability_mode = draw(st.booleans())
        case 8:
            request.attributes["a"].fields["b"].string_value = "c"
        case _:
            return field(draw(st.sampled_from([1, 2, 4, 5, 8, 11, 15, 16, 1000])), draw(st.binary(max_size=12)))
    return request.SerializeToString()


@given(st.lists(one_field(), max_size=4), st.data())
def test_any_message_is_read_as_protobuf_reads_it(fields: list[bytes], more: st.DataObject) -> None:
    """Fields in any order and more than once, unknown ones, cut anywhere, with any byte changed."""
    data = b"".join(fields)
    match more.draw(st.sampled_from(["whole", "cut", "changed"])):
        case "cut":
            data = data[: more.draw(st.integers(0, min(len(data), 600)))]
        case "changed" if data:
            at = more.draw(st.integers(0, min(len(data), 200) - 1))
            data = data[:at] + bytes([more.draw(st.integers(0, 255))]) + data[at + 1 :]
    assert as_read(data) == as_protobuf_reads(data)


@pytest.mark.parametrize("name", envoys_messages())
def test_every_cut_and_every_changed_byte_is_read_as_protobuf_reads_it(name: str) -> None:
    data = envoys_messages()[name].SerializeToString()
    for at in range(min(len(data), 120)):
        assert as_read(data[:at]) == as_protobuf_reads(data[:at])
        for byte in (0, 1, 0x0A, 0x7F, 0x80, 0xFF, data[at] + 1 & 0xFF, data[at] - 1 & 0xFF, data[at] ^ 0x10):
            changed = data[:at] + bytes([byte]) + data[at + 1 :]
            assert as_read(changed) == as_protobuf_reads(changed), (at, byte)


@pytest.mark.parametrize(
    "length", [b"\xff\xff\xff\xff\x0f", b"\xff" * 9 + b"\x01", b"\x80\x80\x80\x80\x80\x01", b"\x81\x00"]
)
def test_huge_and_padded_lengths_are_read_as_protobuf_reads_them(length: bytes) -> None:
    for tag in (b"\x12", b"\x22", b"\x42", b"\x5a"):
        for rest in (b"", b"\x00", b"x" * 300):
            assert as_read(tag + length + rest) == as_protobuf_reads(tag + length + rest)


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
    """Agreement of the two readers proves nothing where both are lenient."""
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
