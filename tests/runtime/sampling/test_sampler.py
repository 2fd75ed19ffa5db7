from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from treeline_runtime.messages import SamplingParams
from treeline_runtime.sampling import Row, check_sampling, is_plain_greedy, sample
from treeline_runtime.sampling.logprobs import chosen_and_top
from treeline_runtime.sampling.sampler import uniform

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
    """Of `count` draws in one batch, each with its own seed."""
    rows = [row(seed=i, **params) for i in range(count)]
    counts = Counter(sample(LOGITS.repeat(count, 1), rows).tolist())
    return {token: n / count for token, n in sorted(counts.items())}


def test_uniform_is_uniform_and_independent_of_nothing_but_seed_and_index() -> None:
    values = torch.tensor(
        [uniform(seed, index) for seed in range(100) for index in range(100)], dtype=torch.float64
    )
    assert values.min() >= 0
    assert values.max() < 1
    assert abs(values.mean() - 0.5) < 0.01
    histogram = torch.histc(values, 20, 0, 1)
    assert (histogram - 500).abs().max() < 100
    assert uniform(-5, 3) == uniform(-5, 3) != uniform(-5, 4)


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"top_k": 1}, {"temperature": 1e-7}, {"top_p": 0.0}]
)
def test_greedy_by_any_name_takes_the_likeliest(params: dict[str, Any]) -> None:
    assert [draw(seed=s, **params) for s in range(5)] == [1] * 5


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_tempered_distribution(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(-1).tolist()
    seen = frequencies(temperature=temperature)
    for token in range(VOCAB):
        assert seen.get(token, 0.0) == pytest.approx(expected[token], abs=0.03)


def test_top_k_top_p_and_min_p_limit_the_choice() -> None:
    assert set(frequencies(1000, top_k=3)) == {1, 2, 4}
    # softmax: 1 ≈ .49, 4 ≈ .30, 2 ≈ .07, 6 ≈ .04
    assert set(frequencies(1000, top_p=0.45)) == {1}
    assert set(frequencies(1000, top_p=0.7)) == {1, 4}
    assert set(frequencies(1000, min_p=0.5)) == {1, 4}
    assert set(frequencies(1000, min_p=0.1)) == {1, 2, 4}


def test_top_p_applies_to_what_top_k_left() -> None:
    # of the two that top_k leaves, the first alone has 62 %
    assert set(frequencies(500, top_k=2, top_p=0.6)) == {1}
    assert set(frequencies(500, top_k=2, top_p=0.7)) == {1, 4}


def test_filtered_frequencies_are_renormalised() -> None:
    p1, p4 = LOGITS.softmax(-1)[[1, 4]].tolist()
    assert frequencies(top_k=2)[1] == pytest.approx(p1 / (p1 + p4), abs=0.03)


def test_a_seed_gives_the_same_token_in_any_company() -> None:
    params = {"temperature": 1.5}
    alone = [draw(seed=7, index=i, **params) for i in range(30)]
    assert len(set(alone)) > 2
    for i, token in enumerate(alone):
        others = [row(seed=i, top_k=3), row(temperature=0.0), row(seed=9, min_p=0.1, temperature=0.7)]
        rows = [*others, row(seed=7, index=i, **params), *others]
        assert sample(LOGITS.repeat(len(rows), 1), rows)[3] == token


def test_penalties() -> None:
    history = [4, 1, 1, 1]
    assert draw(temperature=0.0, history=history, prompt_len=1, presence_penalty=0.4) == 1
    assert draw(temperature=0.0, history=history, prompt_len=1, presence_penalty=0.6) == 4, "prompt is free"
    assert draw(temperature=0.0, history=history, prompt_len=1, frequency_penalty=0.2) == 4, "three times 0.2"
    assert draw(temperature=0.0, history=history, prompt_len=3, frequency_penalty=0.2) == 1, "once 0.2"
    assert draw(temperature=0.0, history=history, prompt_len=4, repetition_penalty=9.0) == 2, (
        "prompt and output count"
    )
    negative = torch.tensor([-1.0, -2.0] + [-50.0] * 6)
    assert draw(negative, temperature=0.0, history=[0], repetition_penalty=3.0) == 1, (
        "negative logits are multiplied"
    )


def test_bias_and_minimum_length() -> None:
    assert draw(temperature=0.0, logit_bias={7: 100.0}) == 7
    assert draw(temperature=0.0, logit_bias={1: -100.0, 4: -100.0}) == 2
    assert draw(temperature=0.0, min_new_tokens=2, index=1, stop_ids=(1, 4)) == 2
    assert draw(temperature=0.0, min_new_tokens=2, index=2, stop_ids=(1, 4)) == 1


def test_a_distribution_with_one_candidate_left() -> None:
    logits = torch.full((VOCAB,), -math.inf)
    logits[5] = 0.0
    for params in ({}, {"top_p": 0.5}, {"top_k": 4}, {"min_p": 0.2}):
        assert {draw(logits, seed=s, **params) for s in range(50)} == {5}


def test_what_is_plain() -> None:
    assert is_plain_greedy(SamplingParams(temperature=0.0))
    assert not is_plain_greedy(SamplingParams())
    assert not is_plain_greedy(SamplingParams(temperature=0.0, presence_penalty=0.1))
    assert not is_plain_greedy(SamplingParams(temperature=0.0, logit_bias={1: 1.0}))
    assert not is_plain_greedy(SamplingParams(temperature=0.0, min_new_tokens=1))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens is out of range: -1"),
        ({"min_new_tokens": -1}, "min_new_tokens"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "exceeds max_new_tokens"),
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
    ],
)
def test_parameters_that_make_no_sense_are_named(params: dict[str, Any], message: str) -> None:
    assert message in (check_sampling(SamplingParams(**params), VOCAB) or "")


def test_ordinary_parameters_pass() -> None:
    assert check_sampling(SamplingParams(), VOCAB) is None
    edge = SamplingParams(
        max_new_tokens=0, top_p=0.0, top_k=0, logit_bias={0: -math.inf}, stop_token_ids=(7,)
    )
    assert check_sampling(edge, VOCAB) is None


def test_logprobs_of_the_chosen_and_the_likeliest() -> None:
    expected = LOGITS.log_softmax(-1)
    chosen, top = chosen_and_top(LOGITS[None], torch.tensor([2]), 3)
    assert chosen[0][1] == 2
    assert chosen[0][0] == pytest.approx(float(expected[2]))
    assert [token for _, token in top[0]] == [1, 4, 2]
    assert top[0][0][0] == pytest.approx(float(expected[1]))
    assert chosen_and_top(LOGITS[None], torch.tensor([2]), 0)[1] == [[]]
    assert len(chosen_and_top(LOGITS[None], torch.tensor([2]), 99)[1][0]) == VOCAB
