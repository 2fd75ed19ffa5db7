"""Special tokens are removed from text, however it is cut."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st
from support.outputs import pieces
from treeline_runtime.server.prompts import SpecialTokens, Unmarked

TOKENS = SpecialTokens(["<|im_end|>", "<|im_start|>", "<s>", "[END]", "", "▁x"])
texts = st.lists(
    st.sampled_from([*TOKENS.texts, "<", "<|", "im_end|>", "<|im_", "s>", "[E", "ND]", "word ", "▁", "x", "é"]),
    max_size=8,
).map("".join)


def fed(parts: list[str], tokens: SpecialTokens = TOKENS) -> str:
    clean = Unmarked(tokens)
    return "".join([*map(clean.feed, parts), clean.end()])


@given(texts, st.lists(st.integers(0, 100), max_size=6))
def test_removal_does_not_depend_on_the_cuts_of_the_text(text: str, cuts: list[int]) -> None:
    expected = re.sub("|".join(map(re.escape, TOKENS.texts)), "", text)
    assert fed(pieces(text, cuts)) == fed(list(text)) == expected


def test_only_text_that_may_become_a_special_token_is_held_back() -> None:
    clean = Unmarked(TOKENS)
    assert [clean.feed(piece) for piece in ("a<|im", "_e", "lse", "<|im_end|>b", "<|")] == [
        "a",
        "",
        "<|im_else",
        "b",
        "",
    ]
    assert clean.end() == "<|"
    assert clean.end() == ""


def test_without_special_tokens_nothing_is_held_back() -> None:
    assert Unmarked(SpecialTokens([])).feed("<|im_end|") == "<|im_end|"
