"""Answers are read from the bytes of a stream, from any server and cut anywhere."""

import contextlib
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_openai import DONE, delta, event, usage
from treeline.chat.answer import LONGEST_EVENT, AnswerReader, BadAnswer, Piece, ToolCall, Usage, brief, said
from treeline.printable import printable

WHOLE = (
    delta(role="assistant", content="")
    + delta(reasoning_content="Hm. ")
    + delta(reasoning="France?")
    + delta(content="Paris,\n")
    + delta(content="naïve 🗼")
    + delta(tool_calls=[{"index": 0, "id": "1", "function": {"name": "look", "arguments": '{"at":'}}])
    + delta(tool_calls=[{"index": 1, "function": {"name": "go", "arguments": "{}"}}])
    + delta(tool_calls=[{"index": 0, "function": {"arguments": '"x"}'}}], finish="tool_calls")
    + usage(15, 8, cached=3)
    + DONE
)


def read(*chunks: bytes) -> tuple[AnswerReader, list[Piece]]:
    reader = AnswerReader()
    pieces = [piece for chunk in chunks for piece in reader.take(chunk)]
    return reader, [*pieces, *reader.end()]


@given(st.lists(st.integers(0, len(WHOLE)), max_size=8))
def test_an_answer_is_the_same_wherever_its_bytes_are_cut(cuts):
    bounds = [0, *sorted(cuts), len(WHOLE)]
    reader, pieces = read(*(WHOLE[a:b] for a, b in itertools.pairwise(bounds)))
    assert pieces == [
        Piece("reasoning", "Hm. "),
        Piece("reasoning", "France?"),
        Piece("text", "Paris,\n"),
        Piece("text", "naïve 🗼"),
    ]
    assert reader.answer.text == "Paris,\nnaïve 🗼"
    assert reader.answer.calls == {0: ToolCall("look", '{"at":"x"}'), 1: ToolCall("go", "{}")}
    assert reader.answer.usage == Usage(15, 8, 3)
    assert reader.answer.finish_reason == "tool_calls"


@given(st.text())
def test_terminal_control_characters_are_removed_from_texts(text):
    left = printable(text)
    assert all(char in "\n\t" or (ord(char) >= 32 and not 0x7F <= ord(char) <= 0x9F) for char in left)
    assert not set("\u202e\u2066") & set(left)


@given(st.text(alphabet=st.characters(exclude_categories=["Cc", "Cs", "Cf"])))
def test_text_without_control_characters_is_unchanged(text):
    assert printable(text) == text


@pytest.mark.parametrize("field", ["content", "reasoning_content", "reasoning"])
def test_escape_sequences_of_an_answer_lose_their_escape(field):
    _, pieces = read(delta(**{field: "\x1b]0;title\x07\x9b31mred\x1b[2J"}), DONE)
    assert pieces[0].text == "�]0;title��31mred�[2J"


def test_tool_calls_lose_their_escapes_too():
    reader, _ = read(delta(tool_calls=[{"index": 0, "function": {"name": "\x1b[A", "arguments": "\x1b[B"}}]), DONE)
    assert reader.answer.calls == {0: ToolCall("�[A", "�[B")}


@pytest.mark.parametrize("ending", [b"", b": a comment\n\n", b"data: {"])
def test_a_stream_that_ends_before_its_answer_is_a_failure(ending):
    with pytest.raises(BadAnswer, match=r"broke off|no chunk"):
        read(delta(content="Par"), ending)


def test_a_finish_reason_ends_an_answer_where_no_done_follows():
    assert read(delta(content="x", finish="stop"))[1] == [Piece("text", "x")]


@pytest.mark.parametrize(
    "line",
    ["nonsense", "[]", "7", '{"choices": 3}', '{"choices": [{"delta": {"content": 5}}]}', "[" * 100_000, '"\\ud800'],
)
def test_an_invalid_chunk_is_quoted_in_one_short_line(line):
    with pytest.raises(BadAnswer, match="no chunk of a chat completion") as caught:
        read(b"data: " + line.encode() + b"\n\n")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("prefix", [b"data: ", b""])
def test_a_line_that_never_ends_is_given_up(prefix):
    reader = AnswerReader()
    list(reader.take(prefix))
    for _ in range(LONGEST_EVENT // 65536 - 1):
        list(reader.take(b"x" * 65536))
    with pytest.raises(BadAnswer, match="more than"):
        list(reader.take(b"x" * 131072))


@pytest.mark.parametrize(
    ("error", "shown"),
    [({"message": "out of\nmemory"}, "out of memory"), ("plain", "plain"), ({"code": 7}, '{"code":7}'), ([1], "[1]")],
)
def test_an_error_in_the_stream_is_shown_in_its_own_words(error, shown):
    with pytest.raises(BadAnswer) as caught:
        read(event(error=error))
    assert str(caught.value) == f"the server ended the answer: {shown}"


def test_server_errors_become_one_short_printable_line():
    assert said({"error": {"message": "a\x1b[31m\n b"}}) == "a�[31m b"
    assert len(brief("x" * 10**6)) == 301


@given(st.binary(max_size=300))
def test_any_bytes_are_an_answer_or_a_typed_error(data):
    with contextlib.suppress(BadAnswer):
        read(data)


def test_choices_besides_the_first_are_left_out():
    other = b"data: " + json.dumps({"choices": [{"index": 1, "delta": {"content": "no"}}]}).encode() + b"\n\n"
    assert read(other, delta(content="yes"), DONE)[1] == [Piece("text", "yes")]


def test_text_before_an_error_in_one_chunk_is_shown():
    pieces = AnswerReader().take(delta(content="half") + event(error={"message": "too warm"}))
    assert next(pieces) == Piece("text", "half")
    with pytest.raises(BadAnswer, match="too warm"):
        next(pieces)
