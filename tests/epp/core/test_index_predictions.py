"""The index predicts the blocks of routed prompts, and limits hits."""

import random

import pytest
from support.epp_core import KEYS, WIDTH, Prompt, blocks, hit, make_index
from treeline_epp.index.pods import Hit
from treeline_wire.events import BlockRemoved


def test_a_routed_prompt_is_predicted_then_confirmed() -> None:
    index, (pod, other) = make_index()
    known, prompt = Prompt.random(1, 9), Prompt.random(1, 9).extended(2, 9)
    index.apply(pod, known.stored(), KEYS)
    first = hit(index, pod, prompt)
    index.predict(pod, None, prompt.key, first, now=0.0)
    predicted = hit(index, pod, prompt)
    assert predicted.tokens >= first.tokens, "its text may confirm one more block's end"
    assert predicted.reach == len(prompt.key) - 8
    assert hit(index, other, prompt) == Hit()
    index.apply(pod, prompt.stored(9), KEYS)
    confirmed = hit(index, pod, prompt)
    assert confirmed.tokens >= 16 * WIDTH
    assert confirmed.reach >= confirmed.end
    index.apply(pod, BlockRemoved(prompt.hashes[9:]), KEYS)
    assert hit(index, pod, prompt).reach <= known.end(9), "what was confirmed is not predicted any more"
    index.check()


def test_a_match_looks_at_a_bounded_number_of_predicted_lengths() -> None:
    index, pods = make_index(100)
    key = Prompt.random(1, 40).key
    for number, pod in enumerate(pods):
        index.predict(pod, None, key[: 150 + number], Hit(), now=0.0)
    levels = index.match(pods[0].scope, None, key, 1.0).levels
    assert 10 < len(levels) <= 65
    assert sum(level.pods for level in levels) == sum(pod.bit for pod in pods), "each pod is in one level"


def test_predictions_end_with_time_or_with_failure() -> None:
    index, (pod,) = make_index(1, eventless_life_s=10.0)
    prompt, failed = Prompt.random(1, 9), Prompt.random(2, 9)
    index.predict(pod, None, prompt.key, Hit(), now=0.0)
    ends_at = index.predict(pod, None, failed.key, Hit(), now=0.0)
    index.withdraw(pod, None, failed.key, ends_at)
    assert hit(index, pod, failed).reach == 0
    assert hit(index, pod, prompt, now=9.9).reach > 0
    assert hit(index, pod, prompt, now=10.0).reach == 0, "also before the next tick"
    index.tick(10.0)
    assert index.totals()["text_bytes"] == 0
    index.check()


def test_a_prediction_beyond_evicted_blocks_does_not_count() -> None:
    index, (pod,) = make_index(1)
    known, prompt = Prompt.random(1, 9), Prompt.random(1, 9).extended(2, 9)
    index.apply(pod, known.stored(), KEYS)
    index.predict(pod, None, prompt.key, hit(index, pod, prompt), now=0.0)
    index.apply(pod, BlockRemoved(known.hashes[4:]), KEYS)
    found = hit(index, pod, prompt)
    assert known.end(3) <= found.end <= known.end(4)
    assert found.reach == found.end


def test_a_prediction_continues_confirmed_blocks() -> None:
    index, (pod, other) = make_index()
    known, prompt = Prompt.random(1, 9), Prompt.random(1, 9).extended(2, 9)
    index.predict(pod, None, prompt.key, hit(index, pod, prompt), now=0.0)
    index.apply(pod, known.stored(), KEYS)  # the first part of its prefill
    assert hit(index, pod, prompt) == Hit(9 * WIDTH, known.end(9), len(prompt.key) - 8)
    index.apply(other, known.stored(), KEYS)
    assert hit(index, other, prompt) == Hit(9 * WIDTH, known.end(9), known.end(9)), "the same cut"


def test_a_prediction_continues_blocks_whose_end_is_unproved() -> None:
    index, (pod, other) = make_index()
    known, prompt = Prompt.random(1, 9), Prompt.random(1, 9).extended(2, 9)
    for each in (pod, other):
        index.apply(each, known.stored(), KEYS)
    before = hit(index, pod, prompt)
    assert before.tokens < 9 * WIDTH
    index.predict(pod, None, prompt.key, before, now=0.0)
    assert hit(index, pod, prompt) == Hit(before.tokens, before.end, len(prompt.key) - 8)
    assert hit(index, other, prompt) == before, "the other pod's prediction says nothing of its blocks"


@pytest.mark.parametrize("max_edge", [5, 8192])
@pytest.mark.parametrize("shared", range(1, 5))
def test_a_prediction_outlives_the_confirmation_of_another_that_begins_in_the_same_block(
    shared: int, max_edge: int
) -> None:
    index, (pod,) = make_index(1, max_edge=max_edge)
    system = Prompt.random(1, 9).tokens[: 8 * WIDTH + shared]  # ends within a block
    one, other = (Prompt([*system, *Prompt.random(seed, 9).tokens]) for seed in (2, 3))
    both = next(at for at, (a, b) in enumerate(zip(one.key, other.key, strict=False)) if a != b)
    index.predict(pod, None, one.key, hit(index, pod, one), now=0.0)
    index.predict(pod, None, other.key, hit(index, pod, other), now=0.0)
    index.apply(pod, other.stored(), KEYS)
    found = hit(index, pod, one)
    assert found.end <= both < found.reach == len(one.key) - 8
    index.check()


def test_predictions_keep_to_their_budget_oldest_first() -> None:
    index, (pod,) = make_index(1, eventless_bytes=1000)
    prompts = [Prompt.random(seed, 40) for seed in range(6)]
    for now, prompt in enumerate(prompts):
        index.predict(pod, None, prompt.key, Hit(), now=float(now))
    assert index.totals()["text_bytes"] <= 1000
    assert hit(index, pod, prompts[-1], now=6.0).reach > 0
    assert hit(index, pod, prompts[0], now=6.0).reach == 0
    index.check()


def test_a_prediction_in_place_of_a_longer_one_gives_its_text_up() -> None:
    index, (pod,) = make_index(1)
    prompt = Prompt.random(1, 9)
    index.predict(pod, None, prompt.key, Hit(0, 20, 20), now=0.0)
    index.predict(pod, None, prompt.key[:10], Hit(), now=1.0)
    index.check()
    assert index.totals()["text_bytes"] == 10


@pytest.mark.parametrize("seed", range(10))
def test_predictions_survive_splits_and_merges(seed: int) -> None:
    rng = random.Random(seed)
    index, pods = make_index(3, max_edge=rng.choice([5, 9, 40]), eventless_life_s=20.0, prediction_life_s=5.0)
    base = Prompt.random(seed, 6)
    prompts = [base.extended(seed + i, rng.randrange(1, 6)) for i in range(6)]
    for step in range(150):
        now = step * 0.3
        pod, prompt = rng.choice(pods), rng.choice(prompts)
        action = rng.randrange(4)
        if action == 0:
            index.predict(pod, None, prompt.key[: rng.randrange(len(prompt.key))], Hit(), now)
            assert hit(index, pod, prompt, now).reach >= 0
        elif action == 1:
            index.apply(pod, prompt.stored(), KEYS)
        elif action == 2:
            index.apply(pod, BlockRemoved(prompt.hashes[rng.randrange(len(prompt.hashes)) :]), KEYS)
        else:
            index.withdraw(pod, None, prompt.key, index.predict(pod, None, prompt.key, Hit(), now))
        index.tick(now, budget=5)
        index.check()
    for pod in pods:
        index.clear(pod)
    for _ in range(50):
        index.tick(1e6)
    assert index.totals()["text_bytes"] == index.totals()["blocks"] == 0


def test_a_doubt_caps_hits_below_its_node_and_expires() -> None:
    index, (pod, other) = make_index(hit_cap_life_s=30.0)
    prompt = Prompt.random(1, 20)
    sibling = Prompt([*prompt.tokens[: 5 * WIDTH], *Prompt.random(7, 15).tokens])
    for each in (pod, other):
        index.apply(each, prompt.stored(), KEYS)
        index.apply(each, sibling.stored(), KEYS)
    index.cap_hit(pod, None, prompt.key, 6 * WIDTH, now=0.0)
    assert blocks(index, pod, prompt) == 6
    assert blocks(index, pod, sibling) >= 18
    assert blocks(index, other, prompt) >= 18
    index.tick(31.0)
    assert blocks(index, pod, prompt, now=31.0) >= 18
