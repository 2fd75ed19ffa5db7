"""Tokens as bytes: a grammar sees the bytes that an answer has."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from treeline_runtime.grammar.vocabulary import Vocabulary
from treeline_wire.tokenizer import TokenizerBundle

TINY = TokenizerBundle.from_dir(Path(__file__).parents[3] / "models" / "tiny")
TOKENIZER = Tokenizer.from_str(TINY.tokenizer_json)
SIZE = TOKENIZER.get_vocab_size()
VOCABULARY = Vocabulary.of(TINY, SIZE + 5, (SIZE - 1,))


@given(st.lists(st.integers(0, SIZE - 1), max_size=12))
def test_joined_token_texts_equal_the_decoded_text(ids: list[int]) -> None:
    joined = b"".join(VOCABULARY.texts[id] for id in ids)
    assert joined.decode(errors="replace") == TOKENIZER.decode(ids, skip_special_tokens=True)


def test_each_row_of_the_head_has_a_text() -> None:
    assert len(VOCABULARY.texts) == SIZE + 5
    assert VOCABULARY.texts[SIZE:] == [b""] * 5


def test_a_stop_token_is_no_text_and_no_mark() -> None:
    assert VOCABULARY.stop_ids == (SIZE - 1,)
    assert VOCABULARY.texts[SIZE - 1] == b""
    assert SIZE - 1 not in VOCABULARY.marks
    assert Vocabulary.of(TINY, SIZE, (65,)).texts[65] == b"", "a stop token has no text"


def test_added_tokens_are_text_and_special_ones_are_marks() -> None:
    tokenizer = Tokenizer.from_str(TINY.tokenizer_json)
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    tokenizer.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    bundle = TokenizerBundle.build(tokenizer.to_str())
    assert json.loads(bundle.tokenizer_json)
    found = Vocabulary.of(bundle, SIZE + 8, (SIZE - 1,))
    think, calls = tokenizer.token_to_id("<think>"), tokenizer.token_to_id("[TOOL_CALLS]")
    assert found.texts[think] == b"<think>"
    assert found.texts[calls] == b""
    assert found.marks[calls] == b"[TOOL_CALLS]"
    assert found.with_marks()[calls] == b"[TOOL_CALLS]"
