import random
from pathlib import Path

import pytest
from support.bench import train_tokenizer, words
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from treeline_bench.prompts import PromptError, PromptMaker


@pytest.mark.parametrize("tokens", [1, 64, 1024])
def test_texts_have_exactly_the_length_asked_for(maker: PromptMaker, tokens: int) -> None:
    text = maker.text(tokens, random.Random(3))
    assert maker.count(text) == tokens


def test_a_tail_leaves_the_prefix_as_it_was(maker: PromptMaker, model: Path) -> None:
    rng = random.Random(4)
    prefix = maker.text(256, rng)
    first, second = (prefix + maker.text(32, rng) for _ in range(2))
    assert maker.count(first) == maker.count(second) == 288
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert tokenizer.encode(first).ids[:256] == tokenizer.encode(second).ids[:256] == tokenizer.encode(prefix).ids
    assert first != second


def test_a_bos_token_is_counted_and_not_built() -> None:
    tokenizer = train_tokenizer(words())
    bos = tokenizer.token_to_id("<|im_start|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)]
    )
    maker = PromptMaker(tokenizer)
    assert maker.count(maker.text(20, random.Random(1))) == 21


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_tokenizers_that_write_spaces_like_sentencepiece(scheme: str) -> None:
    """`always` adds a space in front, as Llama 2 does: a token of its own at the beginning of a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    trainer = trainers.BpeTrainer(vocab_size=900, show_progress=False)
    tokenizer.train_from_iterator([" " + " ".join(words())] * 9, trainer)
    maker = PromptMaker(tokenizer)
    rng = random.Random(2)
    prefix = maker.text(30, rng)
    assert maker.count(prefix + maker.text(12, rng)) - maker.count(prefix) == 12
    assert maker.count(prefix) - 30 in (0, 1)


def test_a_vocabulary_without_words_is_refused() -> None:
    with pytest.raises(PromptError, match="words of one token"):
        PromptMaker(train_tokenizer(words(), size=260))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"tokenizer\.json"):
        PromptMaker.of_model(tmp_path)
