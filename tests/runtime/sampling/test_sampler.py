from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import NoBadWordsLogitsProcessor
from treeline_runtime.messages import Grammar, SamplingParams
from treeline_runtime.sampling import Row, check_sampling, needs_more, sample

VOCAB = 8
LOGITS = torch.tensor([0.0, 3.0, 1.0, -2.0, 2.5, -1.0, 0.5, -9.0])


def row(
    seed: int = 0,
    index: int = 0,
    history: list[int] | None = None,
    prompt_len: int = 0,
    stop_ids: tuple[int, ...] = (),
    **params: Any,
) -> Row:
    tokens = None if history is None else torch.tensor(history)
    return Row(SamplingParams(**params), seed, index, frozenset(stop_ids), prompt_len, tokens)


def draw(logits: torch.Tensor = LOGITS, **fields: Any) -> int:
    return int(sample(logits.clone()[None], [row(**fields)])[0])


def frequencies(count: int = 4000, **params: Any) -> dict[int, float]:
    """Return each token's frequency in `count` draws of one batch, each with its own seed."""
    rows = [row(seed=i, **params) for i in range(count)]
    counts = Counter(sample(LOGITS.repeat(count, 1), rows).tolist())
    return {token: n / count for token, n in sorted(counts.items())}


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_k": 1}, {"temperature": 1e-7}, {"top_p": 0.0}])
def test_greedy_in_any_spelling_takes_the_likeliest_token(params: dict[str, Any]) -> None:
    assert [draw(seed=s, **params) for s in range(5)] == [1] * 5


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.8, "top_k": 40},
        {"top_p": 0.9},
        {"top_k": 50, "top_p": 0.8},
        {"min_p": 0.02},
        {"temperature": 1.3, "top_k": 30, "top_p": 0.95, "min_p": 0.01},
    ],
    ids=str,
)
@pytest.mark.parametrize("ranked", [16, pytest.param(1024, marks=pytest.mark.deep)])
def test_every_token_is_drawn_as_often_as_its_probability_says(
    params: dict[str, Any], ranked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chi-square against the distribution, computed naively; also where too few tokens are ranked at first."""
    monkeypatch.setattr("treeline_runtime.sampling.sampler.RANKED", ranked)
    vocab, draws = 300, 20_000
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(1)) * 2
    wanted = (logits.double() / params.get("temperature", 1.0)).softmax(-1)
    ordered, ids = wanted.sort(descending=True)
    ordered[params.get("top_k", vocab) :] = 0
    ordered[ordered.cumsum(-1) - ordered >= params.get("top_p", 1.0) * ordered.sum()] = 0
    ordered[ordered < params.get("min_p", 0.0) * ordered[0]] = 0
    wanted = torch.zeros(vocab, dtype=torch.float64).scatter(0, ids, ordered / ordered.sum())
    counts = torch.zeros(vocab, dtype=torch.float64)
    for start in range(0, draws, 10_000):
        rows = [row(seed=seed, index=seed % 5, **params) for seed in range(start, start + 10_000)]
        counts += torch.bincount(sample(logits.repeat(10_000, 1), rows), minlength=vocab)
    assert counts[wanted == 0].sum() == 0
    common = wanted * draws >= 10
    expected = torch.cat((wanted[common], wanted[~common].sum()[None])) * draws
    seen = torch.cat((counts[common], counts[~common].sum()[None]))
    chi = float(((seen - expected)[expected > 0] ** 2 / expected[expected > 0]).sum())
    freedom = int((expected > 0).sum()) - 1
    assert abs(chi - freedom) < 4 * math.sqrt(2 * freedom)


def test_equal_logits_are_kept_by_token_id_in_any_batch() -> None:
    logits = torch.zeros(1, 64)
    for params in ({"top_k": 3}, {"top_p": 0.04}):
        alone = [int(sample(logits.clone(), [row(seed=s, **params)])[0]) for s in range(200)]
        assert set(alone) == {0, 1, 2}
        others = [row(seed=1, top_k=40), row(seed=2, min_p=0.5), row(seed=3)]
        for seed, token in enumerate(alone):
            rows = [*others, row(seed=seed, **params)]
            assert sample(logits.repeat(len(rows), 1), rows)[-1] == token


@pytest.mark.deep
@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 20, "top_p": 0.95}, {"min_p": 0.02}], ids=str)
def test_the_last_bits_of_the_logits_hardly_ever_decide(params: dict[str, Any]) -> None:
    """Kernels sum in different orders; to imitate that, every logit moves by up to 1e-6 of its size."""
    generator = torch.Generator().manual_seed(3)
    rows, vocab = 2000, 4096
    logits = torch.randn(rows, vocab, generator=generator) * 3
    moved = logits * (1 + 1e-6 * (2 * torch.rand(rows, vocab, generator=generator) - 1))
    how = [row(seed=i, index=i, **params) for i in range(rows)]
    assert int((sample(logits, how) != sample(moved, how)).sum()) <= 1


def test_penalties() -> None:
    history = [4, 1, 1, 1]
    assert draw(temperature=0.0, history=history, prompt_len=1, presence_penalty=0.4) == 1
    assert draw(temperature=0.0, history=history, prompt_len=1, presence_penalty=0.6) == 4, "prompt is free"
    assert draw(temperature=0.0, history=history, prompt_len=1, frequency_penalty=0.2) == 4, "three times 0.2"
    assert draw(temperature=0.0, history=history, prompt_len=3, frequency_penalty=0.2) == 1, "once 0.2"
    assert draw(temperature=0.0, history=history, prompt_len=4, repetition_penalty=9.0) == 2, "prompt and output count"
    negative = torch.tensor([-1.0, -2.0] + [-50.0] * 6)
    assert draw(negative, temperature=0.0, history=[0], repetition_penalty=3.0) == 1, "negative logits are multiplied"


def test_a_distribution_with_one_candidate_left() -> None:
    logits = torch.full((VOCAB,), -math.inf)
    logits[5] = 0.0
    for params in ({}, {"top_p": 0.5}, {"top_k": 4}, {"min_p": 0.2}):
        assert {draw(logits, seed=s, **params) for s in range(50)} == {5}


def test_parameters_beyond_a_temperature_need_the_full_sampler() -> None:
    assert not needs_more(SamplingParams(temperature=0.0))
    assert not needs_more(SamplingParams(temperature=0.0, top_p=0.5))
    assert not needs_more(SamplingParams(temperature=0.7))
    assert needs_more(SamplingParams(top_p=0.5))
    assert needs_more(SamplingParams(temperature=0.0, presence_penalty=0.1))
    assert needs_more(SamplingParams(temperature=0.0, logit_bias={1: 1.0}))
    assert needs_more(SamplingParams(temperature=0.0, min_new_tokens=1))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens is out of range: -1"),
        ({"min_new_tokens": -1}, "min_new_tokens"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "exceeds max_new_tokens"),
        ({"min_new_tokens": 1, "grammar": Grammar("regex", "a")}, "decides where it ends"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": -0.5}, "min_p"),
        ({"frequency_penalty": math.inf}, "frequency_penalty"),
        ({"presence_penalty": math.nan}, "presence_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"logit_bias": {8: 1.0}}, "logit_bias names token 8; the vocabulary has 8"),
        ({"logit_bias": {1: math.nan}}, "logit_bias of token 1 is nan"),
        ({"stop_token_ids": (99,)}, "stop_token_ids names token 99"),
        ({"stop_token_ids": (1,) * 129}, "stop_token_ids has 129 tokens"),
    ],
)
def test_invalid_parameters_are_named(params: dict[str, Any], message: str) -> None:
    assert message in (check_sampling(SamplingParams(**params), VOCAB) or "")


def test_ordinary_parameters_pass() -> None:
    assert check_sampling(SamplingParams(), VOCAB) is None
    edge = SamplingParams(max_new_tokens=0, top_p=0.0, top_k=0, logit_bias={0: -math.inf}, stop_token_ids=(7,))
    assert check_sampling(edge, VOCAB) is None


# ---- tokens that are excluded ---------------------------------------------------------------------------------------


def test_only_allowed_tokens_are_drawn() -> None:
    assert set(frequencies(500, allowed_token_ids=(2, 4, 6))) == {2, 4, 6}
    assert draw(temperature=0.0, allowed_token_ids=(7, 3)) == 3


WORDS = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3), min_size=1, max_size=6)


@given(WORDS, st.lists(st.integers(0, VOCAB - 1), max_size=6))
def test_bad_words_are_excluded_as_transformers_does(words: list[list[int]], output: list[int]) -> None:
    judge = NoBadWordsLogitsProcessor(words)
    expected = judge(torch.tensor([output], dtype=torch.long), LOGITS.clone()[None])[0]
    mine = LOGITS.clone()
    params = {"bad_words": tuple(map(tuple, words)), "temperature": 0.0}
    prompt = [1, 2, 3]  # what it ends with begins no bad word, as in vLLM
    sample(mine[None], [row(history=prompt + output, prompt_len=3, index=len(output), **params)])
    assert mine.tolist() == expected.tolist()
