"""Answers that are drawn with guesses have the distribution that the model and the parameters give, by Pearson's test.

The exact distribution of the first three tokens is computed here from the model's logits after each possible beginning,
so neither the sampler nor plain decoding is the measure. Seeds are fixed: of a hundred other choices each test fails
with one by chance.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from support.runtime_constraints import Constrained, Toy, follows
from support.runtime_engine import VOCAB, Harness, prompt
from treeline_runtime.scheduler import Scheduler, decode, drafting, step_times

pytestmark = pytest.mark.deep

IDS, SOME = prompt(7, 6), (3, 11, 24, 40, 77, 90)
DRAWS, TOGETHER = 2000, 128
SAMPLING: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.5, "allowed_token_ids": SOME},
    "cold": {"temperature": 0.4, "allowed_token_ids": SOME},
    "top-k": {"temperature": 2.0, "top_k": 8},
    "top-p": {"temperature": 1.0, "top_p": 0.6, "allowed_token_ids": SOME},
    "min-p": {"temperature": 1.5, "min_p": 0.4, "allowed_token_ids": SOME},
    "all of them": {"temperature": 1.2, "top_k": 7, "top_p": 0.9, "min_p": 0.1},
    "penalties": {
        "temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.6, "presence_penalty": 0.5,
        "allowed_token_ids": (*SOME[:3], *IDS[:3]),
    },
    "bias": {"temperature": 1.0, "logit_bias": {3: 1.5, 24: -1.0, 77: 0.7}, "allowed_token_ids": SOME},
    "grammar": {"temperature": 1.3},
}  # fmt: skip
DEPTHS, RIGHT = (1, 3, 7), (1.0, 0.5, 0.0)
CASES = [(name, depth, RIGHT[(i + j) % 3]) for i, name in enumerate(SAMPLING) for j, depth in enumerate(DEPTHS)]
"""Parameters, guesses for a request in a step, share of them that are right."""


class Drawing(Constrained):
    """Many requests at once, without the harness's checks after every step."""

    step = Scheduler.step  # type: ignore[assignment]

    def __init__(self, tiny: Path, **settings: Any) -> None:
        super().__init__(
            tiny, max_total_tokens=8192, chunked_prefill_size=2048, max_running_requests=TOGETHER, **settings
        )

    def draws(self, name: str, seeds: Sequence[int], most: int) -> list[list[int]]:
        for seed in seeds:
            toy = Toy(follows) if name == "grammar" else None
            self.ask(str(seed), IDS, toy, max_new_tokens=most, seed=seed, **SAMPLING[name])
        self.run()
        return [self.tokens(str(seed)) for seed in seeds]


class Told:
    """Guesses an answer that it is told, with errors, which the grammar allows too."""

    def __init__(self, answer: Sequence[int], right: float, chance: random.Random) -> None:
        self._answer, self._right, self._chance = answer, right, chance

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        found = [tokens[-1]]
        for token in self._answer[len(tokens) - len(IDS) :][:most]:
            found.append(token if self._chance.random() < self._right else (found[-1] * 5 + 7) % VOCAB)
        return found[1:]


@cache
def logits_after(tiny: Path, ids: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Return the model's logits of the next token."""
    engine, found = Harness(tiny), list[torch.Tensor]()
    logits = engine.executor._model.logits

    def watched(hidden: torch.Tensor, out: None = None) -> torch.Tensor:
        found.append(logits(hidden).clone())
        return found[-1].clone()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.executor._model, "logits", watched)
        engine.generate("a", list(ids), max_new_tokens=1)
    return found[0][0].double().numpy()


def probabilities(
    logits: npt.NDArray[np.float64], output: Sequence[int], allowed: Sequence[int] | None, params: Mapping[str, Any]
) -> dict[int, float]:
    """Return the probability of each token that may follow, as the documentation of the parameters says."""
    logits = logits.copy()
    for token in {*IDS, *output}:
        factor = params.get("repetition_penalty", 1.0)
        logits[token] *= factor if logits[token] < 0 else 1 / factor
    for token, count in Counter(output).items():
        logits[token] -= params.get("frequency_penalty", 0.0) * count + params.get("presence_penalty", 0.0)
    for token, bias in params.get("logit_bias", {}).items():
        logits[token] += bias
    kept = sorted(range(VOCAB) if allowed is None else allowed, key=lambda token: -logits[token])
    weights = np.exp((logits[kept] - logits[kept].max()) / params["temperature"])
    weights = weights[: params.get("top_k", VOCAB)]
    weights /= weights.sum()
    weights = weights[weights.cumsum() - weights < params.get("top_p", 1.0)]
    weights = weights[weights >= params.get("min_p", 0.0) * weights[0]]
    return dict(zip(kept, weights / weights.sum(), strict=False))


def expected(tiny: Path, name: str) -> dict[tuple[int, ...], float]:
    """Return the probability of each beginning of three tokens."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    params = SAMPLING[name]
    for _ in range(3):
        longer = {}
        for output, share in found.items():
            allowed = list(follows(list(output))) if name == "grammar" else params.get("allowed_token_ids")
            following = probabilities(logits_after(tiny, (*IDS, *output)), output, allowed, params)
            longer |= {(*output, token): share * one for token, one in following.items()}
        found = longer
    return found


def p_value(drawn: Sequence[tuple[int, ...]], shares: Mapping[tuple[int, ...], float]) -> float:
    """Return the chance that draws from this distribution differ from it as much as these; rare cells are one."""
    counts, cells, rare = Counter(drawn), list[tuple[int, float]](), [0, 0.0]
    assert counts.keys() <= shares.keys(), "an impossible answer"
    for output, share in shares.items():
        if share * len(drawn) >= 5:
            cells.append((counts[output], share * len(drawn)))
        else:
            rare = [rare[0] + counts[output], rare[1] + share * len(drawn)]
    if rare[1] >= 5:
        cells.append((int(rare[0]), rare[1]))
    assert len(cells) > 5
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


@pytest.mark.parametrize(("name", "depth", "right"), CASES)
def test_answers_with_guesses_have_the_exact_distribution(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, name: str, depth: int, right: float
) -> None:
    monkeypatch.setattr(drafting, "DEPTHS", ((1, ((0.0, depth),)),))
    monkeypatch.setattr(decode, "MOST_SAMPLED", TOGETHER * (1 + depth))
    monkeypatch.setattr(step_times, "FEW", TOGETHER + 1)  # whatever they cost
    first = 10**6 + DRAWS * CASES.index((name, depth, right))
    seeds, most = range(first, first + DRAWS), 2 + depth  # so that a draft of this depth begins with the second token
    answers = dict(zip(seeds, Drawing(tiny).draws(name, seeds, most), strict=True)) if right else {}
    engine = Drawing(tiny, speculative_algorithm="NGRAM", speculative_num_draft_tokens=depth)
    chance = random.Random(first)
    assert engine._speculation is not None
    nothing = [0] * most
    engine._speculation._new_drafter = lambda req: Told(answers.get(req.seed, nothing), right, chance)
    drawn = engine.draws(name, seeds, most)
    load = engine.load()
    assert load.total_drafts > DRAWS / 2
    assert (sum(load.accepted_per_position) > 0.9 * load.total_draft_tokens) == (right == 1.0)
    assert p_value([tuple(output[:3]) for output in drawn], expected(tiny, name)) > 0.01


def test_the_test_finds_a_wrong_distribution(tiny: Path) -> None:
    drawn = Drawing(tiny).draws("temperature", range(DRAWS), 3)
    assert p_value([tuple(output) for output in drawn], expected(tiny, "temperature")) > 0.01
    assert p_value([(*output[:2], output[1]) for output in drawn], expected(tiny, "temperature")) < 1e-6
    assert len({tuple(output) for output in drawn}) > 50
