"""Random traffic with aborts, stops, retractions, flushes: the accounts balance after every step, survivors are
right."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from support.runtime_engine import Harness, prompt
from treeline_runtime.messages import FlushReq, StopReq

CONFIGS: list[dict[str, Any]] = [
    {"page_size": 4, "max_total_tokens": 256, "chunked_prefill_size": 16},
    {"page_size": 1, "max_total_tokens": 160, "chunked_prefill_size": 24, "schedule_policy": "lpm"},
    {"page_size": 16, "max_total_tokens": 512, "chunked_prefill_size": 32, "eviction_policy": "lfu"},
    {"page_size": 4, "max_total_tokens": 200, "overlap_depth": 1, "prefills_in_a_row": 2},
    {"page_size": 4, "max_total_tokens": 200, "overlap_depth": 1, "prefix_cache": "off"},
    {"page_size": 4, "max_total_tokens": 200, "overlap_depth": 1, "cache_audit": 1.0},
    {"page_size": 4, "max_total_tokens": 200, "overlap_depth": 1, "mixed_chunk": True, "schedule_policy": "lpm"},
    {
        "page_size": 1,
        "max_total_tokens": 160,
        "overlap_depth": 1,
        "max_running_requests": 3,
        "eviction_policy": "lfu",
    },
]


@pytest.fixture(scope="module")
def expected(tiny: Path) -> dict[tuple[int, ...], list[int]]:
    """Greedy outputs of every prompt of the traffic, each computed alone."""
    engine = Harness(tiny, max_total_tokens=4096)
    found = {}
    for ids in prompts():
        engine.cache.flush()
        found[tuple(ids)] = engine.generate(str(len(engine.outs)), ids, max_new_tokens=30)
    return found


def prompts() -> list[list[int]]:
    """Return a few families of prompts with shared beginnings."""
    rng = random.Random(0)
    families = [prompt(seed, 70) for seed in range(4)]
    return [rng.choice(families)[: rng.randint(1, 70)] + prompt(100 + i, rng.randint(1, 9)) for i in range(30)]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.deep)])
@pytest.mark.parametrize("settings", CONFIGS)
def test_random_traffic_keeps_every_invariant(
    tiny: Path, expected: dict[tuple[int, ...], list[int]], settings: dict[str, Any], seed: int
) -> None:
    rng = random.Random(seed)
    engine = Harness(
        tiny,
        max_running_requests=settings.get("max_running_requests", 8),
        **{k: v for k, v in settings.items() if k != "max_running_requests"},
    )
    engine.ratio.initial = engine.ratio.minimum = engine.ratio.value = 0.1  # optimistic: retractions happen
    pool = prompts()
    asked: dict[str, list[int]] = {}
    ended: set[str] = set()
    for _ in range(160):
        action = rng.random()
        if action < 0.3 and len(asked) < 40:
            rid = str(len(asked))
            asked[rid] = rng.choice(pool)
            engine.submit(rid, asked[rid], max_new_tokens=rng.choice([0, 1, 5, 30]), return_logprob=rng.random() < 0.2)
        elif action < 0.36 and asked:
            rid = rng.choice(list(asked))
            ended.add(rid)
            engine.inbox.append(StopReq(rid, "x"))
        elif action < 0.42 and asked:
            rid = rng.choice(list(asked))
            ended.add(rid)
            engine.abort(rid)
        elif action < 0.46:
            engine.inbox.append(FlushReq("f"))
        elif action < 0.47:
            ended |= set(asked)
            engine.abort()
        engine.step()
    engine.run()
    assert set(engine.outs) == set(asked)
    for rid, ids in asked.items():
        tokens, finish = engine.tokens(rid), engine.last(rid).finish
        assert finish is not None
        assert tokens == expected[tuple(ids)][: len(tokens)], rid
        if rid not in ended:
            assert finish.type == "length"
    engine.inbox.append(FlushReq("end"))
    engine.run()
    assert engine.cache.pool.num_free == engine.cache.pool.num_pages
