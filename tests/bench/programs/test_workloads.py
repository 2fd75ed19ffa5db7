"""The workloads on a backend without a model: their requests, and the prefixes that their prompts share."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from support.lang_backend import FakeBackend
from treeline_bench.programs.workloads import WORKLOADS, Data, Workload
from treeline_bench.prompts import PromptMaker

SCALE = 0.1
KINDS = {
    "mmlu": {"generate": 1},
    "hellaswag": {"select": 1},
    "react": {"generate": 5},
    "agents": {"generate": 5},
    "tree_of_thought": {"generate": 30, "warm": 15},
    "skeleton_of_thought": {"generate": 10},
    "judge": {"generate": 7, "warm": 1},
    "json_decode": {"generate": 5},
    "multi_turn_short": {"generate": 4},
    "multi_turn_long": {"generate": 4},
    "rag": {"generate": 2},
}
"""The requests of one program."""


def data(maker: PromptMaker, seed: str = "x", scale: float = SCALE) -> Data:
    return Data(maker, seed, scale)


def run(workload: Workload, maker: PromptMaker, **options: Any) -> FakeBackend:
    backend = FakeBackend()
    batch = workload.make(data(maker), 1)
    for state in batch.program.run_batch(batch.arguments, backend=backend, generator_style=True, **options):
        assert state.error() is None
    return backend


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_program_asks_as_often_as_the_published_one(name: str, maker: PromptMaker) -> None:
    backend = run(WORKLOADS[name], maker)
    assert Counter(request.kind for request in backend.requests) == KINDS[name]


@pytest.mark.parametrize("name", WORKLOADS)
def test_without_hints_and_parallelism_it_asks_the_same_one_after_another(name: str, maker: PromptMaker) -> None:
    together, apart = run(WORKLOADS[name], maker), run(WORKLOADS[name], maker, hints=False, parallel=False)
    assert apart.most == 1
    plain = [(r.prompt.text, r.sampling.limit) for r in together.requests if r.kind != "warm"]
    assert sorted((r.prompt.text, r.sampling.limit) for r in apart.requests) == sorted(plain)


@pytest.mark.parametrize("name", WORKLOADS)
def test_texts_are_those_of_their_seed(name: str, maker: PromptMaker) -> None:
    make = WORKLOADS[name].make
    first, again, other = (make(data(maker, seed), 3).arguments for seed in ("a", "a", "b"))
    assert first == again != other
    assert len(first) == 3


def test_lengths_are_scaled_but_never_nothing(maker: PromptMaker) -> None:
    half = data(maker, scale=0.5)
    assert (half.tokens(100), half.tokens(1)) == (50, 1)
    assert maker.count(half.text(60)) == 30
    assert 5 <= maker.count(half.between(10, 20)) <= 10


def test_questions_of_a_subject_share_its_examples(maker: PromptMaker) -> None:
    asked = WORKLOADS["mmlu"].make(data(maker), 20).arguments
    assert sorted(Counter(one["examples"] for one in asked).values()) == [10, 10]
    assert len({one["question"] for one in asked}) == len(asked)


def test_branches_of_a_thought_grow_from_one_another(maker: PromptMaker) -> None:
    asked = [request for request in run(WORKLOADS["tree_of_thought"], maker).requests if request.kind == "generate"]
    by_stage = Counter(request.prompt.text.count("Assistant:") for request in asked)
    assert by_stage == {1: 2, 2: 4, 3: 8, 4: 16}
    tokens = round(256 * SCALE)
    assert {request.sampling.limit for request in asked} == {tokens}


def test_a_judge_reads_all_candidates(maker: PromptMaker) -> None:
    *branches, last = [request for request in run(WORKLOADS["judge"], maker).requests if request.kind == "generate"]
    [article] = {request.prompt.text.partition("\nJudge:")[0] for request in branches}
    assert last.prompt.text.startswith(article)
    assert last.prompt.text.count("\nFound: ") == 6 == len(branches)


def test_a_conversation_has_all_of_its_turns_in_the_prompt(maker: PromptMaker) -> None:
    texts = [request.prompt.text for request in run(WORKLOADS["multi_turn_short"], maker).requests]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
