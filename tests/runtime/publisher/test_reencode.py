"""Re-encoding restores most of a sequence, with a real byte-level BPE tokenizer."""

from __future__ import annotations

import random

import pytest
from support.runtime_server import make_tokenizer
from tokenizers import Tokenizer
from treeline_runtime.publisher.announced_index import TokenizerReencoder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def reencoder(tokenizer: Tokenizer) -> TokenizerReencoder:
    return TokenizerReencoder(tokenizer)


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def test_encoded_text_agrees_to_its_end(tokenizer: Tokenizer, reencoder: TokenizerReencoder) -> None:
    for text in (
        "The quick brown fox",
        "<|im_start|>user\nhello world<|im_end|>\n",
        "naïve 😀 日本語",
        "  a \n\n b",
    ):
        tokens = ids(tokenizer, text)
        assert reencoder.agreed_len(tokens, 0) == len(tokens)


def test_agreement_ends_where_a_word_was_sampled_in_pieces(tokenizer: Tokenizer, reencoder: TokenizerReencoder) -> None:
    before, after = ids(tokenizer, "The quick"), ids(tokenizer, " fox jumps")
    pieces = [id for char in " brown" for id in ids(tokenizer, char)]
    assert len(pieces) > len(ids(tokenizer, " brown"))
    assert reencoder.agreed_len([*before, *pieces, *after], len(before)) == len(before)


def test_a_prompt_in_pieces_is_taken_as_given(tokenizer: Tokenizer, reencoder: TokenizerReencoder) -> None:
    prompt = [id for char in " brown" for id in ids(tokenizer, char)]
    assert reencoder.agreed_len([*prompt, *ids(tokenizer, " fox")], len(prompt)) == len(prompt)


def test_a_special_token_shields_what_comes_after_it(tokenizer: Tokenizer, reencoder: TokenizerReencoder) -> None:
    prompt = [
        *(id for char in " brown" for id in ids(tokenizer, char)),
        *ids(tokenizer, "<|im_start|>assistant\n"),
    ]
    whole = [*prompt, *ids(tokenizer, "hello world")]
    assert reencoder.agreed_len(whole, len(prompt)) == len(whole)


def test_an_unfinished_character_at_the_end_counts_as_agreeing(
    tokenizer: Tokenizer, reencoder: TokenizerReencoder
) -> None:
    tokens = ids(tokenizer, "hello 😀")
    for cut in (1, 2, 3):
        assert reencoder.agreed_len(tokens[:-cut], 0) == len(tokens) - cut


def test_agreeing_tokens_equal_the_encoding_of_their_text(tokenizer: Tokenizer, reencoder: TokenizerReencoder) -> None:
    rng = random.Random(1)
    for _ in range(300):
        tokens = [rng.randrange(3, tokenizer.get_vocab_size()) for _ in range(rng.randint(1, 20))]
        agreed = reencoder.agreed_len(tokens, 0)
        text = tokenizer.decode(tokens, skip_special_tokens=False)
        if agreed and not text.endswith("�"):
            assert ids(tokenizer, text)[:agreed] == tokens[:agreed]
