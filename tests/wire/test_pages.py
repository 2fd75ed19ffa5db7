"""Messages about pages: what is encoded is parsed, and anything else is refused as told."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from treeline_wire.pages import (
    MOST_DIGESTS,
    MOST_REQUEST_BYTES,
    GetRequest,
    HaveRequest,
    Held,
    Later,
    Pages,
    PagesError,
    encode_answer,
    encode_request,
    parse_answer,
    parse_request,
)

DIGESTS = st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=5)
REQUESTS = st.builds(HaveRequest, st.binary(max_size=20), DIGESTS, st.booleans()) | st.builds(
    GetRequest, st.binary(max_size=20), DIGESTS, st.integers(0, 1 << 40)
)
ANSWERS = st.builds(Held, st.integers(0, 1 << 20)) | st.builds(
    Pages, st.integers(0, 1 << 40), st.lists(st.integers(0, (1 << 64) - 1), max_size=5)
)
ANSWERS |= st.just(Later())


@given(request=REQUESTS)
def test_requests_are_parsed_as_they_were_encoded(request: HaveRequest | GetRequest) -> None:
    assert parse_request(encode_request(request)) == request


@given(answer=ANSWERS, data=st.binary(max_size=64))
def test_answers_are_parsed_as_they_were_encoded(answer: Held | Pages, data: bytes) -> None:
    found, there = parse_answer(encode_answer(answer, data))
    assert (found, bytes(there)) == (answer, data)


@given(frames=st.lists(st.binary(max_size=40), max_size=6), request=REQUESTS, cut=st.integers(1, 50))
def test_other_frames_are_refused(frames: list[bytes], request: HaveRequest, cut: int) -> None:
    *head, message = encode_request(request)
    assert parse_request(frames) is None
    assert parse_request([*head, message[:-cut]]) is None
    for others in (frames, [*head, message, b""], [*head, b"\x81\xa4type\xa4held", b""]):
        with pytest.raises(PagesError):
            parse_answer(others)


def test_a_question_of_an_earlier_version_is_not_about_pages_to_come() -> None:
    message = msgspec.msgpack.encode({"type": "have", "fingerprint": b"f", "digests": [b"d" * 32]})
    assert parse_request([b"", b"treeline", b"1", message]) == HaveRequest(b"f", [b"d" * 32], coming=False)


def test_the_largest_request_fits_and_a_larger_one_is_none() -> None:
    most = GetRequest(b"f" * 16, [b"d" * 32] * MOST_DIGESTS, (1 << 64) - 1)
    assert len(encode_request(most)[-1]) < MOST_REQUEST_BYTES
    assert parse_request(encode_request(most)) == most
    for digests in ([b"d" * 32] * (MOST_DIGESTS + 1), [b"d" * 31], []):
        assert parse_request(encode_request(GetRequest(b"f" * 16, digests, 0))) is None
