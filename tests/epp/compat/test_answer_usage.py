"""Token counts are read from an answer of any API, whole or truncated."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from treeline_epp.requests.exchange import Exchange
from treeline_epp.requests.usage import KEPT_OF_OBJECT, KEPT_OF_STREAM, NOTHING, Usage, usage_of

OPENAI = {"prompt_tokens": 10, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}
RESPONSES = {"input_tokens": 10, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 8}}
ANTHROPIC = {"input_tokens": 2, "cache_read_input_tokens": 8, "cache_creation_input_tokens": 0, "output_tokens": 3}
SGLANG = {"prompt_tokens": 10, "completion_tokens": 3, "cached_tokens": 8, "e2e_latency": 0.1}
ALL = Usage(10, 8, 3)


def events(*documents: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(document).encode() + b"\n\n" for document in documents)


@pytest.mark.parametrize(
    "document",
    [{"choices": [], "usage": OPENAI}, {"usage": RESPONSES}, {"usage": ANTHROPIC}, {"text": "x", "meta_info": SGLANG}],
)
def test_usage_is_read_from_a_whole_answer_of_each_api(document: Any) -> None:
    assert usage_of(b"", json.dumps(document).encode(), stream=False, whole=True) == ALL


@pytest.mark.parametrize(
    "stream",
    [
        events({"choices": [1], "usage": None}, {"choices": [], "usage": OPENAI}) + b"data: [DONE]\n\n",
        b"event: response.completed\n" + events({"type": "response.completed", "response": {"usage": RESPONSES}}),
        events(
            {"type": "message_start", "message": {"usage": {**ANTHROPIC, "output_tokens": 1}}},
            *({"type": "content_block_delta"} for _ in range(3)),
            {"type": "message_delta", "usage": {"output_tokens": 3}},
            {"type": "message_stop"},
        ),
        events(
            {"text": "a", "meta_info": {**SGLANG, "completion_tokens": 1}}, {"text": "ab", "meta_info": SGLANG}
        ).replace(b"\n\n", b"\r\n\r\n"),
    ],
)
def test_usage_is_read_at_the_end_or_the_beginning_of_a_stream(stream: bytes) -> None:
    assert usage_of(stream[:4096], stream, stream=True, whole=True) == ALL


def test_the_end_of_a_stream_suffices_and_half_an_event_is_skipped() -> None:
    stream = events(*({"choices": [], "usage": {"prompt_tokens": 9}} for _ in range(50)), {"usage": OPENAI})
    assert usage_of(b"", stream[-300:], stream=True, whole=False) == ALL


@pytest.mark.parametrize(
    "usage",
    [
        None,
        [],
        {},
        {"prompt_tokens": -1, "completion_tokens": 1.5},
        {"prompt_tokens": True, "completion_tokens": "3"},
        {"prompt_tokens": 10**30, "prompt_tokens_details": [1]},
    ],
)
def test_invalid_counts_are_ignored(usage: Any) -> None:
    document = json.dumps({"usage": usage}).encode()
    assert usage_of(b"", document, stream=False, whole=True) == NOTHING
    assert usage_of(b"", b"data: " + document, stream=True, whole=True) == NOTHING


def test_text_that_looks_like_usage_is_ignored() -> None:
    document = {"choices": [{"message": {"content": json.dumps({"usage": OPENAI}), "usage": OPENAI}}]}
    assert usage_of(b"", json.dumps(document).encode(), stream=False, whole=True) == NOTHING
    assert usage_of(b"", b'{"usage": ' + json.dumps(OPENAI).encode() + b"}", stream=False, whole=False) == NOTHING


@given(st.binary(max_size=200), st.binary(max_size=200), st.booleans(), st.booleans())
def test_nothing_in_a_body_is_an_error(first: bytes, last: bytes, stream: bool, whole: bool) -> None:
    for body in (last, b"data: " + last, b'{"usage": {"prompt_tokens": ' + last):
        found = usage_of(first, body, stream=stream, whole=whole)
        assert all(count is None or count >= 0 for count in (found.prompt, found.cached, found.output))


@given(st.lists(st.integers(1, 40_000), max_size=40), st.booleans())
def test_only_the_end_of_a_body_is_kept_however_it_is_cut(sizes: list[int], stream: bool) -> None:
    exchange = Exchange("r", "/", None, "", 0, True, False, 0.0)
    exchange.answered({":status": "200", "content-type": "text/event-stream" if stream else "x"}, None, NOTHING, 0.0)
    ending = events({"usage": OPENAI}) if stream else b""
    for size in sizes:
        exchange.shown(b"\n" * size, 1.0, ended=False)
    exchange.shown(ending, 2.0, ended=True)
    assert exchange.body is not None
    assert sum(map(len, exchange.body._last)) <= (KEPT_OF_STREAM if stream else KEPT_OF_OBJECT) + max([*sizes, 300])
    assert exchange.response_bytes == sum(sizes) + len(ending)
    assert exchange.usage == (ALL if stream else NOTHING)
