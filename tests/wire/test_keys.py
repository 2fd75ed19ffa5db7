"""Prefix keys: tokenizing and not tokenizing give the same bytes."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import wire as support
from treeline_wire.keys import KeySelfTestError, PrefixKeys

_FRAGMENTS = [
    "hello", "othello", " ", "  ", "   ", "\n", "\n\n", "\t", "<s>", "</s>", "<unk>", "[INST]", "<|im_start|>",
    "<|im_end|>", "<|endoftext|>", "<left>", "<right>", "<both>", "<both><right>", "normal", "Normal", "two words",
    "two  words", "<0x41>", "<0xE2>", "＜s＞", "▁", "▁▁", "Ġ", "e\u0301", "A\u030a", "Å", "Å",
    "ﬁ", "가", "\u1100\u1161",
    "😀", "👩‍👩‍👧", "🇩🇪", "工欲", "ещё", "مرحبا", "नमस्ते", "\x00", "\x1c", "\x85", "\u00a0", "\u3000", "\u200d",
    "\ufeff", "_", "1", "12345", "'ll", "<tool_call>", "<start_of_turn>", "\r\n", "\U00011935\U00011930", "\u0898",
]  # fmt: skip
_ALPHABET = st.one_of(
    st.characters(codec="utf-8"),
    st.characters(codec="utf-8", categories=["Mn", "Mc", "Lo", "So", "Zs", "Cc", "Cf", "Cn"]),
)
texts = st.lists(st.one_of(st.sampled_from(_FRAGMENTS), st.text(_ALPHABET, max_size=6)), max_size=12).map(
    "".join
)


@pytest.fixture(scope="module")
def keys_of() -> "dict[str, PrefixKeys]":
    return {name: PrefixKeys.from_tokenizer_json(support.tokenizer(name).to_str()) for name in support.GOOD}


@pytest.mark.parametrize("name", support.GOOD)
def test_the_self_test_passes(name: str, keys_of: dict[str, PrefixKeys]) -> None:
    keys_of[name].self_test()


@pytest.mark.parametrize("name", support.GOOD)
@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(text=texts, special=st.booleans())
def test_tokens_and_text_have_one_key(
    name: str, keys_of: dict[str, PrefixKeys], text: str, special: bool
) -> None:
    ids = support.tokenizer(name).encode(text, add_special_tokens=special).ids
    assert keys_of[name].block_key(ids) == keys_of[name].prompt_key(text, special), (name, text)


@pytest.mark.parametrize("name", support.BAD)
def test_a_tokenizer_that_loses_text_is_refused(name: str) -> None:
    build, reason = support.BAD[name]
    with pytest.raises(KeySelfTestError, match=reason):
        PrefixKeys.from_tokenizer_json(build().to_str()).self_test()
