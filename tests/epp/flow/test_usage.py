"""Usage, read from the end of answers that pass through."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treeline_epp.requests.usage import KEPT_OF_STREAM, MOST_COUNTED, NOTHING, Usage, UsageReader

CHAT = json.dumps(
    {
        "choices": [{"message": {"content": 'he said "completion_tokens": 7 to me'}}],
        "usage": {
            "prompt_tokens": 100,
            "completion_tokens": 20,
            "total_tokens": 120,
            "prompt_tokens_details": {"cached_tokens": 64},
            "completion_tokens_details": {"reasoning_tokens": 3},
        },
    }
).encode()
STREAM = b'data: {"choices":[{"delta":{"content":"x"}}],"usage":null}\n\n' * 9
ANTHROPIC = b'event: message_delta\ndata: {"type":"message_delta","usage":{"input_tokens":5,"output_tokens":11}}\n\n'
OLLAMA = b'{"model":"m","message":{"role":"assistant","content":"\\"done\\":"},"done":false}\n'
LAST = b'{"model":"m","message":{"content":""},"done":true,"prompt_eval_count":8,"eval_count":9}\n'


def read(*pieces: bytes) -> Usage:
    body = b"".join(pieces)
    reader = UsageReader(stream=not body.startswith(b"{") or body.startswith(OLLAMA))
    for piece in pieces:
        reader.feed(piece)
    return reader.estimate()


@pytest.mark.parametrize(
    ("body", "usage"),
    [
        (CHAT, Usage(100, 64, 20)),
        (STREAM, Usage(None, None, 9)),
        (STREAM + b'data: {"choices":[],"usage":{"prompt_tokens":8,"completion_tokens":9}}\n\n', Usage(8, None, 9)),
        (ANTHROPIC, Usage(5, None, 11)),
        (b'{"data": [], "usage": {"prompt_tokens": 8, "total_tokens": 8}}', Usage(8, None, None)),
        (b'{"usage": {"completion_tokens": 99999999999}}', Usage(None, None, None)),
        (OLLAMA * 5, Usage(None, None, 5)),
        (OLLAMA * 9 + LAST, Usage(8, None, 9)),
        (LAST, Usage(8, None, 9)),
        (b"", Usage(None, None, None)),
    ],
)
def test_usage_is_read_from_answers(body: bytes, usage: Usage) -> None:
    assert read(body) == usage


@given(st.lists(st.integers(0, len(CHAT)), max_size=8))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_usage_is_the_same_in_pieces_and_whole(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(CHAT)]
    assert read(*(CHAT[a:b] for a, b in pairwise(edges))) == read(CHAT)


@given(st.lists(st.binary(max_size=9000), max_size=6))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_bytes_are_read_without_an_error(pieces: list[bytes]) -> None:
    reader = UsageReader(stream=True)
    for piece in pieces:
        reader.feed(memoryview(piece))
    assert sum(map(len, reader._last)) <= KEPT_OF_STREAM + 9000
    reader.estimate()


@pytest.mark.parametrize("size", [1, 7, 100])
def test_an_answer_in_many_small_pieces_is_read_as_one_in_a_few(size: int) -> None:
    document = {"choices": [{"text": "x" * 20_000}], "usage": {"prompt_tokens": 8, "completion_tokens": 9}}
    whole = json.dumps(document).encode()
    ending = b'data: {"choices":[],"usage":{"prompt_tokens":8,"completion_tokens":9},"more":"%s"}\n\n' % (b"y" * 8000)
    for body in (whole, STREAM * 50 + ending):
        assert read(*(body[at : at + size] for at in range(0, len(body), size))) == Usage(8, None, 9)


def test_small_pieces_take_no_more_memory_than_large_ones() -> None:
    reader = UsageReader(stream=True)
    for _ in range(10 * KEPT_OF_STREAM):
        reader.feed(b"data")
        assert sum(map(len, reader._last)) <= 2 * KEPT_OF_STREAM
    assert reader.bytes == 40 * KEPT_OF_STREAM


def test_later_usage_overrides_earlier_usage() -> None:
    assert Usage(None, 2, 3).over(Usage(5, 1, None)) == Usage(5, 2, 3)


def test_an_engines_absurd_usage_is_not_charged() -> None:
    assert Usage(99_999_999, None, 1).counted() == Usage(MOST_COUNTED, None, 1)
    assert NOTHING.counted() == NOTHING
