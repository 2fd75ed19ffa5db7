"""Messages between pickers: encoded ones are decoded, and other bytes are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from treeline_wire import peers
from treeline_wire.peers import (
    MOST_BYTES,
    MOST_ID,
    MOST_MARKS,
    MOST_PARTS,
    Ask,
    Closed,
    Delta,
    How,
    Leave,
    Message,
    Opened,
    PeerMessageError,
    Snapshot,
    decode,
    encode,
    packed,
)

IDS = st.integers(0, MOST_ID)
NUMBERS = st.integers(0, (1 << 56) - 1)
MARKS = st.integers(0, (1 << peers.MARK_BITS) - 1)
NONCES = st.binary(min_size=peers.NONCE_BYTES, max_size=peers.NONCE_BYTES)


@st.composite
def opened(draw: st.DrawFn) -> Opened:
    return Opened(
        draw(IDS),
        draw(st.binary(min_size=peers.REF_BYTES, max_size=peers.REF_BYTES)),
        draw(NUMBERS),
        draw(NUMBERS),
        draw(NUMBERS),
        draw(NUMBERS),
        tuple(draw(st.lists(MARKS, max_size=MOST_MARKS))),
        draw(st.one_of(st.just(0), MARKS)),
    )


CLOSED = st.builds(Closed, IDS, st.sampled_from(How))
MESSAGES = st.one_of(
    st.builds(Delta, NUMBERS, st.lists(st.one_of(opened(), CLOSED), max_size=12).map(tuple)),
    st.builds(Ask, st.binary(min_size=6, max_size=6), NONCES),
    st.builds(
        lambda nonce, seq, part, more, records: Snapshot(nonce, seq, part, part + more, tuple(records)),
        NONCES,
        NUMBERS,
        st.integers(0, MOST_PARTS - 8),
        st.integers(1, 8),
        st.lists(opened(), max_size=12),
    ),
    st.just(Leave()),
)


@given(MESSAGES)
def test_encoded_messages_are_decoded(message: Message) -> None:
    assert decode(encode(message)) == message


@given(st.one_of(st.binary(max_size=80), st.tuples(MESSAGES, st.integers(0, 1200), st.binary(max_size=9))))
def test_bytes_are_a_message_or_an_error_of_one_kind(given: bytes | tuple[Message, int, bytes]) -> None:
    if isinstance(given, tuple):
        data = encode(given[0])
        given = data[: given[1]] + given[2] + data[given[1] + 1 :]
    try:
        message = decode(given)
    except PeerMessageError:
        return
    assert decode(encode(message)) == message


@given(st.lists(st.one_of(opened(), CLOSED), max_size=200))
def test_many_records_go_into_few_messages(records: list[Opened | Closed]) -> None:
    counts = packed(records)
    assert sum(counts) == len(records)
    start, sizes = 0, []
    for count in counts:
        sizes.append(len(encode(Delta((1 << 56) - 1, tuple(records[start : start + count])))))
        start += count
    assert all(size <= MOST_BYTES for size in sizes)
    assert all(size > MOST_BYTES // 2 for size in sizes[:-1])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00",
        b"\x90",
        b"\x91\x09",
        b"\x91\x01",
        b"\x92\x01\x00\x00",
        bytes(MOST_BYTES + 1),
        b"\x93\x01\x01\x91\x92\x09\x02",
    ],
)
def test_invalid_bytes_are_no_message(data: bytes) -> None:
    with pytest.raises(PeerMessageError):
        decode(data)


def test_a_parts_number_is_within_its_parts() -> None:
    for part, parts in ((1, 1), (0, 0), (0, MOST_PARTS + 1)):
        with pytest.raises(PeerMessageError):
            decode(encode(Snapshot(bytes(8), 1, part, parts)))


def test_a_typical_request_takes_some_forty_bytes_and_a_new_prompt_some_ninety() -> None:
    """The numbers are written here, so that a change of the format is noticed."""
    mark = (1 << peers.MARK_BITS) - 1
    ref = peers.endpoint_ref("llama-7d9f-x2", "10.0.3.17:8000")
    hit = Delta(300_000, (Opened(1_000_000, ref, 180, 45, marks=(mark,)),))
    new = Delta(300_000, (Opened(1_000_000, ref, 6_000, 1_500, marks=(mark,) * 6),))
    assert (len(encode(hit)), len(encode(new))) == (37, 85)
    assert len(encode(Delta(300_000, (Closed(1_000_000, How.PREFILLED),)))) == 16
