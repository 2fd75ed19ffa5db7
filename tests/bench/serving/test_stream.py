"""Streams of servers, cut into pieces anywhere."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_openai import DONE, delta, event, token, usage
from treeline_bench.serving.stream import MAX_EVENT_BYTES, Answer, NotEvents

CHAT = (
    delta(role="assistant", content="")
    + b": keep-alive\n\n"
    + delta(reasoning_content="hm")
    + delta(content="a")
    + delta(content="")  # a token that shows nothing yet
    + delta(tool_calls=[{"index": 0}])
    + delta(content="b", finish="length")
    + usage(7, 5, cached=4)
    + DONE
)


def fed(*pieces: bytes) -> tuple[Answer, int]:
    answer = Answer(keep_text=True)
    return answer, sum(answer.feed(piece) for piece in pieces)


def test_chunks_with_output_are_counted_and_roles_and_bare_ends_are_not() -> None:
    answer, chunks = fed(CHAT)
    assert chunks == 5
    assert answer.text == "ab"
    assert answer.finished
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.cached_tokens) == (7, 5, 4)
    assert fed(token("", finish="stop"))[1] == 0
    assert fed(token(""))[1] == 1  # a server without a tokenizer has no text at all


@given(st.lists(st.integers(0, len(CHAT)), max_size=8), st.booleans())
def test_a_stream_is_read_the_same_however_its_bytes_are_cut(cuts: list[int], crlf: bool) -> None:
    data = CHAT.replace(b"\n", b"\r\n") if crlf else CHAT
    places = [0, *sorted(cuts), len(data)]
    answer, chunks = fed(*(data[start:end] for start, end in itertools.pairwise(places)))
    assert (chunks, answer.text, answer.finished) == (5, "ab", True)


def test_servers_that_do_not_report_cached_tokens() -> None:
    for said in (usage(3, 1), event(choices=[], usage={"prompt_tokens": 3, "prompt_tokens_details": None})):
        answer, _ = fed(said)
        assert answer.usage is not None
        assert answer.usage.cached_tokens == -1


@pytest.mark.parametrize("error", [{"message": "out of memory", "code": 500}, "out of memory"])
def test_an_error_in_the_middle_is_kept(error: object) -> None:
    answer, _ = fed(token(), event(error=error))
    assert answer.error == "out of memory"
    assert not answer.finished


@pytest.mark.parametrize("data", [b"data: <html>\n\n", b'data: {"choices": 3}\n\n', b"data: \xff\n\n"])
def test_lines_that_are_no_chunks_are_refused_and_quoted(data: bytes) -> None:
    with pytest.raises(NotEvents, match="b'"):
        fed(data)


def test_an_event_without_an_end_is_refused() -> None:
    with pytest.raises(NotEvents, match="8 MB"):
        fed(b"data: ", b"x" * (MAX_EVENT_BYTES + 1))


@given(st.binary(max_size=200))
def test_any_bytes_are_chunks_or_refused(data: bytes) -> None:
    try:
        answer, chunks = fed(b"data: " + data + b"\n\n")
    except NotEvents:
        return
    assert chunks >= 0
    assert isinstance(answer.text, str)
