"""The best possible cache, against a plain trie."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer
from treeline_bench.context import BenchmarkError
from treeline_bench.programs.oracle import Found, Tree
from treeline_bench.programs.record import Asked, asked_of, compare, hits


@pytest.mark.parametrize("seed", range(5))
def test_the_tree_finds_what_a_trie_of_single_tokens_would(seed: int) -> None:
    rng = random.Random(seed)
    tree, known = Tree(), {tuple[int, ...]()}
    for _ in range(300):
        tokens = tuple(rng.choices((1, 256, 70_000), k=rng.randint(0, 12)))
        expected = max(n for n in range(len(tokens) + 1) if tokens[:n] in known)
        assert tree.add(tokens) == expected
        known |= {tokens[:n] for n in range(len(tokens) + 1)}


def asked(prompt: list[int], answer: list[int], cached: int) -> Asked:
    return Asked(prompt, answer, len(prompt), cached)


def test_an_answer_is_found_again_but_for_its_last_token(tokenizer: Tokenizer) -> None:
    first, then = [1, 2, 3], [1, 2, 3, 4, 5, 6]
    found = compare([asked(first, [4, 5], 0), asked(then, [], 4)], tokenizer)
    assert (found.prompt, found.cached, found.best) == (9, 4, 4)
    assert (found.vs_optimal, found.rate) == (1.0, 4 / 9)


def test_tokens_that_no_cache_could_hold_are_not_counted_as_missed() -> None:
    assert Found().vs_optimal == 1.0
    assert Found().rate == Found().best_rate == 0.0
    assert hits([asked([1, 2], [], 1), asked([3], [], 0)]) == Found(prompt=3, cached=1)


def test_texts_are_counted_as_the_server_counts_them(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three").ids
    compare([Asked("one two three", [], len(ids), 0)], tokenizer)
    with pytest.raises(BenchmarkError, match=f"{len(ids) + 1} tokens of a prompt, its tokenizer {len(ids)}"):
        compare([Asked("one two three", [], len(ids) + 1, 0)], tokenizer)


def answered(prompt: int, cached: int, ids: list[int]) -> dict[str, object]:
    return {"text": "", "output_ids": ids, "meta_info": {"prompt_tokens": prompt, "cached_tokens": cached}}


def test_bodies_of_one_prompt_of_several_and_of_several_answers_are_read() -> None:
    one = answered(3, 2, [7])
    assert asked_of({"text": "a"}, one) == [Asked("a", [7], 3, 2)]
    assert asked_of({"input_ids": [1, 2, 3]}, one) == [Asked([1, 2, 3], [7], 3, 2)]
    both = asked_of({"text": ["a", "b"]}, [one, answered(4, 0, [])])
    assert both == [Asked("a", [7], 3, 2), Asked("b", [], 4, 0)]
    assert asked_of({"input_ids": [[1], [2]]}, [one, one]) == [Asked([1], [7], 3, 2), Asked([2], [7], 3, 2)]
    assert asked_of({"text": "a", "sampling_params": {"n": 2}}, [one, answered(3, 3, [8])])[1] == Asked("a", [8], 3, 3)
