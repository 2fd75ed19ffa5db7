"""gRPC messages cut anywhere, and the beginning and end of calls."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hpack import Decoder
from hypothesis import given
from hypothesis import strategies as st
from treeline_epp.http2 import grpc
from treeline_epp.http2.grpc import CallError, MessageReader, Status

MOST = 5000


@given(
    messages=st.lists(st.integers(0, MOST).map(lambda size: bytes(i % 251 for i in range(size))), max_size=8),
    cuts=st.lists(st.integers(0, 9 * MOST), max_size=12),
    split_each=st.booleans(),
)
def test_messages_survive_any_cuts(messages: list[bytes], cuts: list[int], split_each: bool) -> None:
    whole = [grpc.prefix(len(message)) + message for message in messages]
    body = b"".join(whole)
    places = sorted({0, len(body), *(place for place in cuts if place < len(body))})
    pieces = whole if split_each else [body[start:end] for start, end in pairwise(places)]
    reader = MessageReader(MOST)
    found = [message for piece in pieces for message in reader.feed(piece)]
    assert found == messages
    assert reader.partial_bytes == 0


def test_small_pieces_are_joined() -> None:
    reader = MessageReader(1 << 20)
    message = bytes(range(256)) * 80
    sent = grpc.prefix(len(message)) + message
    for at in range(0, len(sent) - 2, 2):
        assert reader.feed(sent[at : at + 2]) == []
    assert len(reader._pieces) < len(sent) // 2 // 64 + 64, "an object of its own for two bytes takes fifty"
    assert reader.feed(sent[-2:] if len(sent) % 2 == 0 else sent[-1:]) == [message]


def test_an_unreadable_message_ends_the_call() -> None:
    with pytest.raises(CallError) as error:
        MessageReader(MOST).feed(b"\x01\x00\x00\x00\x01x")
    assert error.value.status is Status.UNIMPLEMENTED


@pytest.mark.parametrize("cut", [1, 3, 9, 99])
@pytest.mark.parametrize("size", [MOST + 1, 1 << 31])
def test_a_too_large_message_is_reported_after_earlier_ones_and_not_kept(size: int, cut: int) -> None:
    reader, sent = MessageReader(MOST), grpc.prefix(1) + b"x" + grpc.prefix(size)
    assert [m for at in range(0, len(sent), cut) for m in reader.feed(sent[at : at + cut])] == [b"x", None]
    assert reader.feed(b"x" * MOST) == []
    assert reader.partial_bytes == 0


def test_a_message_that_is_too_large_may_come_as_a_whole() -> None:
    assert MessageReader(MOST).feed(grpc.prefix(MOST + 1) + b"x" * (MOST + 1)) == [None]


def test_the_fields_of_answers() -> None:
    def decoded(block: bytes) -> list[tuple[str, str]]:
        return [(str(name), str(value)) for name, value in Decoder().decode(block)]

    begin = [(":status", "200"), ("content-type", "application/grpc")]
    assert decoded(grpc.BEGINNING) == begin
    assert decoded(grpc.WELL) == [("grpc-status", "0")]
    assert decoded(grpc.only(Status.INTERNAL, "100 % böse\n")) == [
        *begin, ("grpc-status", "13"), ("grpc-message", "100 %25 b%C3%B6se%0A"),
    ]  # fmt: skip
    long = decoded(grpc.ending(Status.UNKNOWN, "x" * 5000))
    assert long[1] == ("grpc-message", "x" * 1000)


def test_calls_are_recognised_with_their_deadlines() -> None:
    fields = {":method": "POST", ":path": "/a.B/C", "content-type": "application/grpc+proto"}
    assert grpc.method_of(fields) == "/a.B/C"
    assert grpc.method_of(fields | {":method": "GET"}) is None
    assert grpc.method_of(fields | {"content-type": "application/grpcs"}) is None
    assert grpc.timeout_of(fields) is None
    assert grpc.timeout_of({"grpc-timeout": "1500m"}) == 1.5
    assert grpc.timeout_of({"grpc-timeout": "2H"}) == 7200
    with pytest.raises(CallError):
        grpc.timeout_of({"grpc-timeout": "soon"})
