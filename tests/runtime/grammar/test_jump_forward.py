"""Forced text as tokens: those that the tokenizer makes of the whole text, whatever follows it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from treeline_runtime.grammar.jump_forward import Jump, JumpForward, jump_forward
from treeline_runtime.grammar.vocabulary import Vocabulary
from treeline_wire.tokenizer import TokenizerBundle

TINY = Path(__file__).parents[3] / "models" / "tiny"
WORDS = [
    "name",
    "age",
    "full_name",
    "true",
    "false",
    "Zürich",
    "日本",
    "naïve",
    "is",
    "Anna",
    "42",
    "1234567",
    "a-b",
    "é",
]
MARKS = [
    '{"',
    '":',
    '": "',
    '", "',
    ', "',
    '"}',
    "[",
    "]",
    " ",
    "  ",
    "\n",
    ": ",
    "-",
    ".",
    '"',
    "'s",
    "<|im",
    "<tool",
    "x>",
]
CORPUS = [json.dumps({a: b, b: [a, 12, True]}, ensure_ascii=False) for a in WORDS for b in WORDS] + WORDS + MARKS
GPT4 = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(GPT4), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["<|im_end|>"])
    tokenizer.add_tokens(["<tool>"])
    return tokenizer


def sentencepiece(*, splits: bool) -> Tokenizer:
    """SentencePiece with a space before every text and bytes for unknown characters. splits: first into words, as newer
    files say; or not, as Llama 2's do."""
    pieces = [f"<0x{i:02X}>" for i in range(256)]
    metaspace = pre_tokenizers.Metaspace()
    trained = Tokenizer(models.BPE(byte_fallback=True))
    trained.pre_tokenizer = metaspace
    trained.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=700, special_tokens=pieces, limit_alphabet=60, show_progress=False)
    )
    spec = json.loads(trained.to_str())
    spec["added_tokens"] = []
    tokenizer: Tokenizer = Tokenizer.from_str(json.dumps(spec))
    if not splits:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([])
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<|im_end|>"])
    return tokenizer


def made(tokenizer_json: str) -> tuple[Tokenizer, JumpForward, list[bytes]]:
    bundle = TokenizerBundle.build(tokenizer_json)
    tokenizer: Tokenizer = Tokenizer.from_str(tokenizer_json)
    vocabulary = Vocabulary.of(bundle, tokenizer.get_vocab_size(), ())
    return tokenizer, jump_forward(bundle, vocabulary), vocabulary.with_marks()


MADE: dict[str, tuple[Tokenizer, JumpForward, list[bytes]]] = {
    "tiny": made((TINY / "tokenizer.json").read_text()),
    "byte-level": made(byte_level().to_str()),
    "sentencepiece": made(sentencepiece(splits=True).to_str()),
    "llama 2": made(sentencepiece(splits=False).to_str()),
}

texts = st.lists(st.sampled_from(WORDS + MARKS), max_size=14).map("".join)
forced_texts = st.lists(st.sampled_from(WORDS + MARKS), min_size=1, max_size=8).map("".join)
names = st.sampled_from(list(MADE))


def encode(name: str, text: str) -> list[int]:
    ids: list[int] = MADE[name][0].encode(text, add_special_tokens=False).ids
    return ids


def said(name: str, ids: list[int]) -> bytes:
    return b"".join(MADE[name][2][id] for id in ids)


def after(tokens: list[int], jump: Jump) -> list[int]:
    return tokens[: len(tokens) - jump.take_back] + jump.append


@settings(max_examples=250)
@given(names, texts, forced_texts, texts)
def test_jump_tokens_are_those_of_the_whole_text(name: str, before: str, forced: str, then: str) -> None:
    tokens = encode(name, before)
    assume(tokens)  # else some put an unforced space before the forced text
    jump = MADE[name][1].jump(tokens, 0, forced)
    if jump is not None:
        found = after(tokens, jump)
        assert found == encode(name, before + forced + then)[: len(found)]
        assert len(said(name, found)) >= len(said(name, tokens))


@settings(max_examples=200)
@given(names, texts, forced_texts, st.integers(0, 40), st.randoms(use_true_random=False))
def test_a_jump_keeps_the_text_of_any_tokens(
    name: str, before: str, forced: str, fixed: int, rng: random.Random
) -> None:
    """Models may write a text in other tokens than its tokenizer."""
    tokens = split_freely(name, before, rng)
    fixed = min(fixed, len(tokens))
    jump = MADE[name][1].jump(tokens, fixed, forced)
    if jump is not None:
        found = after(tokens, jump)
        assert found[:fixed] == tokens[:fixed]
        assert (said(name, tokens) + forced.encode()).startswith(said(name, found))
        assert said(name, found).startswith(said(name, tokens))


def split_freely(name: str, text: str, rng: random.Random) -> list[int]:
    by_text = {text: id for id, text in enumerate(MADE[name][2]) if text}
    data, ids = text.encode(), list[int]()
    while data:
        lengths = [n for n in range(1, min(len(data), 9) + 1) if data[:n] in by_text]
        n = rng.choice(lengths)
        ids.append(by_text[data[:n]])
        data = data[n:]
    return ids


CASES: list[tuple[str, list[str], str, int, list[str]]] = [
    # what is forced but for its last word, which digits or letters could join
    ("tiny", [], '{"name": "', 0, ['{"', "name", '":']),
    ("tiny", ["<|im_end|>"], '{"name": "', 0, ['{"', "name", '":']),
    # a quote that the tokenizer joins with what follows is replaced
    ("tiny", ["Anna", '"'], ', "age": ', 1, ['",', ' "', "age", '":']),
    ("tiny", ["Anna", '",'], ' "age": ', 0, [' "', "age", '":']),
]


@pytest.mark.parametrize(("name", "before", "forced", "take_back", "append"), CASES)
def test_json_has_forced_text(name: str, before: list[str], forced: str, take_back: int, append: list[str]) -> None:
    tokens = [id for text in before for id in encode(name, text)]
    jump = MADE[name][1].jump(tokens, 0, forced)
    assert jump is not None
    assert (jump.take_back, [said(name, [id]).decode() for id in jump.append]) == (take_back, append)


@pytest.mark.parametrize("name", MADE)
def test_most_of_json_is_forced(name: str) -> None:
    """A jump that never happens would satisfy all properties above."""
    tokens = encode(name, '{"name": "Anna",')
    jump = MADE[name][1].jump(tokens, 0, ' "full_name": true, "age": 42, "is": "')
    assert jump is not None
    assert said(name, after(tokens, jump)).endswith((b' "is":', b' "is": ', b"42,"))


def test_tokens_that_stay_are_never_replaced() -> None:
    tokens = encode("tiny", "Anna") + encode("tiny", '"')
    jump = MADE["tiny"][1].jump(tokens, len(tokens), ', "age": ')
    assert jump is not None
    assert jump.take_back == 0
    assert said("tiny", jump.append) == b', "age":'


def test_a_jump_never_starts_within_a_character() -> None:
    _, forward, texts = MADE["tiny"]
    first = texts.index("日".encode()[:1])
    assert forward.jump([first], 0, "name: name: name") is None


@pytest.mark.parametrize("name", ["tiny", "byte-level"])
def test_the_beginning_of_an_added_token_is_not_forced(name: str) -> None:
    jump = MADE[name][1].jump([], 0, "name is name <|im_e")
    assert jump is not None
    assert b"<" not in said(name, jump.append)


def test_text_that_looks_like_markup_is_one_token_or_none() -> None:
    tokenizer, forward, _ = MADE["tiny"]
    jump = forward.jump([], 0, "name <|im_end|> name name")
    assert jump is not None
    assert tokenizer.token_to_id("<|im_end|>") in jump.append


def test_without_forced_text_there_is_no_jump() -> None:
    assert MADE["tiny"][1].jump(encode("tiny", "name"), 0, "") is None


def test_a_tokenizer_that_changes_texts_does_not_jump() -> None:
    """Its tokens would give another text than the grammar forces."""
    spec: dict[str, Any] = json.loads((TINY / "tokenizer.json").read_text())
    spec["normalizer"] = {"type": "Lowercase"}
    _, forward, _ = made(json.dumps(spec))
    assert forward.jump([], 0, "name: Name: name") is None
    assert forward.jump([], 0, "name: name: name") is not None


def test_encodings_of_one_namespace_make_no_other_faster() -> None:
    forward = made(byte_level().to_str())[1]
    for namespace in ("a", "b", None):
        misses = forward._encode.cache_info().misses
        for _ in range(2):
            forward.jump([], 0, '{"full_name": "', namespace)
        assert forward._encode.cache_info().misses == misses + 1
