"""Answers of servers, cut anywhere, are read as h11 reads them, and no further than the bounds allow."""

from __future__ import annotations

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treeline_epp.endpoints.http_answer import (
    HEAD_BYTES,
    MOST_INTERIM,
    Answer,
    AnswerReader,
    BadAnswer,
    BrokenOff,
    HttpError,
    NotHttp,
)

OK = b"HTTP/1.1 200 OK\r\n"
MOST = 1000


def read(data: bytes, cuts: list[int] | None = None, most: int = MOST) -> Answer | None:
    """Read an answer from these pieces and the end of the connection; None if it was incomplete."""
    reader, places = AnswerReader(most), sorted({min(cut, len(data)) for cut in cuts or []})
    for start, end in zip([0, *places], [*places, len(data)], strict=True):
        if start < end and (answer := reader.feed(data[start:end])) is not None:
            return answer
    return reader.end()


def by_h11(data: bytes) -> tuple[int, bytes]:
    """Return status and body, read by h11."""
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="GET", target="/", headers=[("host", "e")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(data)
    connection.receive_data(b"")
    status, body = 0, b""
    while not isinstance(event := connection.next_event(), h11.EndOfMessage):
        if isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
    return status, body


@st.composite
def answers(draw: st.DrawFn) -> bytes:
    """Draw complete answers, written by h11: with a length, in chunks with trailers, until the end, without a body."""
    connection = h11.Connection(h11.SERVER)
    version = draw(st.sampled_from([b"1.1", b"1.0"]))
    connection.receive_data(b"GET / HTTP/%b\r\nhost: e\r\n\r\n" % version)
    assert isinstance(connection.next_event(), h11.Request)
    assert isinstance(connection.next_event(), h11.EndOfMessage)
    out = b""
    for _ in range(draw(st.integers(0, MOST_INTERIM))):
        out += connection.send(h11.InformationalResponse(status_code=103, headers=[("link", "x")])) or b""
    parts = draw(st.lists(st.binary(max_size=60), max_size=4))
    status = draw(st.sampled_from([200, 302, 404, 503, 204, 304]))
    headers = [("x-a", "1"), ("X-A", "2")]
    if status in (204, 304):
        parts = []
    elif draw(st.booleans()):
        headers.append(("content-length", str(sum(map(len, parts)))))
    out += connection.send(h11.Response(status_code=status, headers=headers, reason=b"Why")) or b""
    for part in parts:
        out += connection.send(h11.Data(data=part)) or b""
    return out + (connection.send(h11.EndOfMessage()) or b"")


@settings(derandomize=True, max_examples=300, deadline=None)
@given(answers(), st.lists(st.integers(0, 500), max_size=12))
def test_an_answer_cut_anywhere_is_read_as_h11_reads_it(data: bytes, cuts: list[int]) -> None:
    answer = read(data, cuts)
    assert answer is not None
    assert (answer.status, answer.body) == by_h11(data)
    assert answer.headers["x-a"] == "1, 2"


@settings(derandomize=True, max_examples=300, deadline=None)
@given(answers(), st.integers(0, 400), st.binary(max_size=8), st.lists(st.integers(0, 500), max_size=5))
def test_any_bytes_are_an_answer_within_bounds_or_a_typed_error(
    data: bytes, at: int, junk: bytes, cuts: list[int]
) -> None:
    spoiled = data[:at] + junk + data[at + len(junk) :]
    results: list[object] = []
    for pieces in (cuts, []):
        try:
            answer = read(spoiled, pieces, most=100)
        except HttpError as error:
            results.append(type(error))
        else:
            assert answer is not None
            assert len(answer.body) <= 100
            results.append((answer.status, answer.body))
    assert results[0] == results[1], "the pieces make no difference"


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6))
def test_bytes_that_are_no_answer_are_a_typed_error(pieces: list[bytes]) -> None:
    with pytest.raises(HttpError):
        read(b"\x00" + b"".join(pieces), [1, 40, 80])


@pytest.mark.parametrize(
    ("data", "keeps"),
    [
        (OK + b"content-length: 2\r\n\r\nhi", True),
        (OK + b"transfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n", True),
        (OK + b"Transfer-Encoding: Chunked\r\n\r\n2;x=y\r\nhi\r\n0\r\nt: 1\r\n\r\n", True),
        (OK + b"content-length: 2\r\n\r\nhiHTTP/1.1 200 OK\r\n", False),
        (OK + b"connection: x, Close\r\ncontent-length: 2\r\n\r\nhi", False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nhi", False),
        (OK + b"\r\nhi", False),
    ],
)
def test_a_connection_is_kept_if_the_end_of_the_answer_is_certain(data: bytes, keeps: bool) -> None:
    answer = read(data)
    assert answer is not None
    assert (answer.body, answer.keeps) == (b"hi", keeps)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", BrokenOff),
        (b"HTTP/2 200\r\n\r\n", NotHttp),
        (b"SSH-2.0-OpenSSH_9.6\r\n", NotHttp),
        (b"HTTP/1.1 2000 OK\r\n\r\n", NotHttp),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", HttpError),
        (b"HTTP/1.1 103 Early Hints\r\n\r\n" * (MOST_INTERIM + 1), HttpError),
        (OK + b"x" * HEAD_BYTES, HttpError),
        (OK + b"no colon\r\n\r\n", NotHttp),
        (OK + b"a: b\r\n folded\r\n\r\n", NotHttp),
        (OK + b"content-length: 2\r\n\r\nh", BrokenOff),
        (OK + b"content-length: -2\r\n\r\nhi", NotHttp),
        (b"HTTP/1.1 200 OK\ncontent-length: 2\n\nhi", NotHttp),
        (OK + b"content-length: 9\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n", NotHttp),
        (OK + b"content-length: 2, 3\r\n\r\nhi", NotHttp),
        (OK + b"content-length: 1001\r\n\r\n", BadAnswer),
        (OK + b"\r\n" + b"x" * 1001, BadAnswer),
        (OK + b"transfer-encoding: gzip, chunked\r\n\r\n", NotHttp),
        (OK + b"transfer-encoding: chunked\r\n\r\n3e9\r\n" + b"x" * 1001, BadAnswer),
        (OK + b"transfer-encoding: chunked\r\n\r\n" + b"f" * 400 + b"\r\n", NotHttp),
        (OK + b"transfer-encoding: chunked\r\n\r\n1;" + b"x" * 5000, BrokenOff),
        (OK + b"transfer-encoding: chunked\r\n\r\n1\r\nhi\r\n0\r\n\r\n", NotHttp),
        (OK + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 400, BadAnswer),
        (OK + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"t: 1\r\n" * HEAD_BYTES, BadAnswer),
        (OK + b"content-encoding: gzip\r\ncontent-length: 0\r\n\r\n", BadAnswer),
    ],
)
def test_unusable_answers_are_refused_by_kind(data: bytes, error: type[HttpError]) -> None:
    with pytest.raises(HttpError) as raised:
        read(data)
    assert type(raised.value) is error


def test_an_answer_in_crumbs_is_given_up() -> None:
    with pytest.raises(HttpError, match="crumbs"):
        read(OK + b"a: b\r\n" * 1000, list(range(5000)))
