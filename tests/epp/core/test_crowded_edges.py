"""Engines that announce the same text under ever new hashes: the cost of each, and the hits that others keep."""

from __future__ import annotations

import random
import time

import pytest
from support.cpu import reference_s
from support.epp_core import KEYS, WIDTH, Prompt, blocks, make_index
from treeline_epp.index import node
from treeline_epp.index.event_filter import Skip
from treeline_epp.index.node import MAX_POD_RUNS
from treeline_epp.index.orphans import Orphan, Orphans
from treeline_wire.events import AllBlocksCleared, BlockRemoved, BlockStored


def chain(prompt: Prompt, draw: random.Random) -> list[int]:
    """Return block hashes of an engine that draws a new hash seed each time."""
    return [draw.getrandbits(60) for _ in prompt.hashes]


@pytest.mark.parametrize("count", [1, 9])
def test_repeated_text_under_new_hashes_has_bounded_cost(count: int) -> None:
    index, (pod, other) = make_index()
    prompt, draw = Prompt.random(1, count), random.Random(1)
    index.apply(other, prompt.stored(), KEYS)
    turns = []
    for _ in range(12):
        began = time.thread_time()
        for _ in range(100):
            index.apply(pod, BlockStored(chain(prompt, draw), None, prompt.tokens, WIDTH), KEYS)
        turns.append(time.thread_time() - began)
    assert min(turns[6:]) < 60 * reference_s(), turns  # a hundred events
    assert pod.skipped == {Skip.CROWDED: count * (1200 - MAX_POD_RUNS)}
    assert pod.blocks == len(index.blocks_of(pod)) == count * MAX_POD_RUNS
    assert blocks(index, other, prompt) == blocks(index, pod, prompt)
    index.check()


def test_refused_blocks_leave_no_text_and_are_accepted_once_there_is_room() -> None:
    index, (pod,) = make_index(1)
    long, draw = Prompt.random(1, 9), random.Random(2)
    for _ in range(MAX_POD_RUNS):
        index.apply(pod, BlockStored(chain(long, draw)[:4], None, long.tokens[: 4 * WIDTH], WIDTH), KEYS)
    text = index.totals()["text_bytes"]
    index.apply(pod, long.stored(), KEYS)
    assert index.totals()["text_bytes"] == text
    index.check()
    victims = random.Random(3).sample(sorted(index.blocks_of(pod)), 200)
    index.apply(pod, BlockRemoved(victims), KEYS)
    index.check()
    index.apply(pod, AllBlocksCleared(), KEYS)
    index.tick(0.0, budget=1000)
    index.tick(0.0, budget=1000)
    index.apply(pod, long.stored(), KEYS)
    assert index.blocks_of(pod) == {*long.hashes}
    index.check()


def test_pods_that_each_draw_their_own_hashes_all_have_hits() -> None:
    index, pods = make_index(100)
    prompt, draw = Prompt.random(1, 9), random.Random(4)
    for pod in pods:
        index.apply(pod, BlockStored(chain(prompt, draw), None, prompt.tokens, WIDTH), KEYS)
    assert {blocks(index, pod, prompt) for pod in pods} == {blocks(index, pods[0], prompt)}
    assert blocks(index, pods[0], prompt) >= 7
    assert not any(pod.skipped for pod in pods)
    index.check()


def test_clearing_and_storing_in_one_batch_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "MAX_RUNS", 200)
    index, (pod,) = make_index(1)
    prompt, draw = Prompt.random(1, 1), random.Random(5)
    for _ in range(300):
        index.apply(pod, BlockStored(chain(prompt, draw), None, prompt.tokens, WIDTH), KEYS)
        if pod.blocks >= MAX_POD_RUNS - 1:
            index.apply(pod, AllBlocksCleared(), KEYS)
    assert index.totals()["blocks"] == 200
    assert pod.skipped[Skip.CROWDED] > 0
    index.check()


def test_a_repeated_orphan_is_kept_a_few_times() -> None:
    orphans = Orphans(10_000)
    event = BlockStored([7], 1, list(range(WIDTH)), WIDTH)
    for _ in range(1000):
        orphans.add(Orphan(1, event, KEYS))
    assert orphans.blocks + orphans.dropped_blocks == 1000
    assert orphans.blocks < 100
    orphans.add(Orphan(2, event, KEYS))
    assert orphans.held_by(2) == {7}, "another pod's are its own"
    orphans.check()
