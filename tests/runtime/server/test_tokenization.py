"""Texts are tokenized piece by piece, and remembered: the ids equal those of the whole, for every kind of tokenizer."""

from __future__ import annotations

import json
from functools import cache
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import wire
from tokenizers import AddedToken, Tokenizer, normalizers
from treeline_runtime.server import tokenization
from treeline_runtime.server.tokenization import CachedTokenizer

UNDEMANDING = [token for token in wire.FLAGGED if not token.single_word]
KINDS = {
    **wire.GOOD,
    **{name: make for name, (make, _) in wire.BAD.items()},
    "flags": lambda: wire.byte_level(added=UNDEMANDING, bos=True),
    "flags_prefix": lambda: wire.byte_level(added=UNDEMANDING, normalizer=normalizers.NFC(), add_prefix_space=True),
    "flags_first": lambda: with_tokens(wire.sentencepiece_bpe(metaspace="first", split=False)),
    "flags_unigram": lambda: with_tokens(wire.unigram(scheme="first")),
}


def with_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_tokens(UNDEMANDING)
    return tokenizer


@cache
def made(kind: str) -> tuple[Tokenizer, str]:
    tokenizer = KINDS[kind]()
    return tokenizer, tokenizer.to_str()


def parts(text: str) -> st.SearchStrategy[str]:
    """Draw added tokens, halves of them, white space around them, and words."""
    tokens = [spec["content"] for spec in json.loads(text).get("added_tokens", ())]
    halves = [token[: len(token) // 2] for token in tokens] + [token[1:] for token in tokens]
    return st.sampled_from(
        [*tokens, *halves, " ", "  ", "\n", "\n\n", "\t ", "hello", "a", "Å", "A\u030a", "é", *wire.CORPUS[:9]]
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("least", [1, pytest.param(20, marks=pytest.mark.deep)])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_growing_text_has_the_ids_of_the_whole(kind: str, least: int, data: st.DataObject) -> None:
    tokenizer, spec = made(kind)
    cached = CachedTokenizer(tokenizer, spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenization, "LEAST_CHARS", least)
        for text in accumulate(data.draw(st.lists(parts(spec), min_size=1, max_size=12))):
            for special in (False, True):
                expected = tokenizer.encode(text, add_special_tokens=special).ids
                assert cached.encode(text, add_special_tokens=special) == expected, text


class Counting:
    """A tokenizer that counts the characters it is given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.chars = 0

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> object:
        self.chars += sum(map(len, texts))
        return self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)


def conversation(turns: int) -> str:
    return "".join(f"<|im_start|>user\nTurn {i}. {wire.CORPUS[0] * 12}<|im_end|>\n" for i in range(turns))


@pytest.fixture
def counting() -> tuple[Counting, CachedTokenizer]:
    tokenizer, spec = made("llama3")
    counting = Counting(tokenizer)
    cached = CachedTokenizer(counting, spec)  # type: ignore[arg-type]
    counting.chars = 0  # those of the probes
    return counting, cached


def test_only_the_newest_turns_are_tokenized(counting: tuple[Counting, CachedTokenizer]) -> None:
    counter, cached = counting
    texts = [conversation(turns) for turns in range(1, 9)]
    for text in texts:
        cached.encode(text, add_special_tokens=True)
    turn = len(conversation(1))
    assert counter.chars < 2.5 * len(texts) * turn, "each turn when it is the last, and once more when it is complete"
    counter.chars = 0
    cached.encode(texts[-1] + "more", add_special_tokens=True)
    assert counter.chars < 1.5 * turn


def test_tokenized_texts_do_not_cross_namespaces(counting: tuple[Counting, CachedTokenizer]) -> None:
    counter, cached = counting
    for namespace in (None, "a", "b"):
        counter.chars = 0
        cached.encode(conversation(4), add_special_tokens=False, namespace=namespace)
        assert counter.chars == len(conversation(4))


def test_remembered_texts_are_bounded() -> None:
    tokenizer, spec = made("llama3")
    cached = CachedTokenizer(tokenizer, spec, capacity_bytes=20_000)
    for i in range(50):
        text = f"<|im_start|>{i} " + conversation(3)
        assert cached.encode(text, add_special_tokens=True) == tokenizer.encode(text).ids
        assert 0 < cached._bytes <= 20_000
    assert sum(tokenization._size(piece, ids) for (_, piece), ids in cached._known.items()) == cached._bytes
    huge = conversation(1) + "<|im_start|>" + "long " * 5000 + "<|im_end|>" + conversation(1)
    assert cached.encode(huge, add_special_tokens=False) == tokenizer.encode(huge, add_special_tokens=False).ids
    assert not any("long" in piece for _, piece in cached._known), "not everything else for one that is huge"


def test_short_and_plain_texts_are_tokenized_at_once(counting: tuple[Counting, CachedTokenizer]) -> None:
    counter, cached = counting
    for text in ("<|im_start|>hi<|im_end|>", wire.CORPUS[0] * 50):
        cached.encode(text, add_special_tokens=True)
        cached.encode(text, add_special_tokens=True)
    assert not cached._known
    assert counter.chars == 2 * (len("<|im_start|>hi<|im_end|>") + 50 * len(wire.CORPUS[0]))


def test_texts_are_not_cut_at_tokens_that_need_word_boundaries() -> None:
    tokenizer, _ = made("gpt2")
    own = Tokenizer.from_str(tokenizer.to_str())
    own.add_tokens([AddedToken("word", single_word=True, normalized=False)])
    cached = CachedTokenizer(own, own.to_str())
    text = "word" + "x" * 600 + "<|im_end|>" + "word " * 300
    assert cached.encode(text, add_special_tokens=False) == own.encode(text).ids
    assert not cached._known
