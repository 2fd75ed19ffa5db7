"""A request whose numbers overflow ends alone: it leaves nothing in the pool, the tree or the events."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.runtime_engine import VOCAB, Harness, prompt
from treeline_runtime.core import Batch
from treeline_runtime.messages import TokenOut
from treeline_runtime.scheduler.launched import Launched

pytestmark = pytest.mark.deep

POISON = VOCAB - 1
"""A token that prompts of `healthy` never contain; its embedding is made infinite."""
FAULT = "the model computed NaN or infinity"
HEALTHY: dict[str, Any] = {"max_new_tokens": 12, "logit_bias": {POISON: -100.0}}


def healthy(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(POISON), k=length)


def poisoned(engine: Harness, monkeypatch: pytest.MonkeyPatch, value: float = torch.inf) -> Harness:
    """Make prompts with POISON overflow from now on, as activations beyond float16 do."""
    model = engine.executor._model
    embedding = model.embedding.clone()
    embedding[POISON] = value
    monkeypatch.setattr(model, "embedding", embedding)
    return engine


def not_finite(engine: Harness) -> int:
    """Return the pages of the pool that hold NaN or infinity."""
    pool = engine.executor.pool
    finite = torch.ones(pool.num_pages, dtype=torch.bool)
    for part in (*pool.keys, *pool.values):
        finite &= part[: pool.num_pages].isfinite().flatten(1).all(1)
    return int((~finite).sum())


# ---- a poisonous prompt -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def forty_answers(tiny: Path) -> list[list[int]]:
    """Forty answers of healthy requests, one after another; the split of memory and the batches do not change them."""
    fresh = Harness(tiny)
    return [fresh.generate(str(i), healthy(i, 20 + i), **HEALTHY) for i in range(40)]


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("settings", [{}, {"overlap_depth": 1}, {"chunked_prefill_size": 64}])
def test_eight_overflowing_prompts_do_not_change_forty_healthy_answers(
    tiny: Path,
    forty_answers: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    page_size: int,
    settings: dict[str, Any],
) -> None:
    engine = poisoned(Harness(tiny, page_size=page_size, max_total_tokens=2048, **settings), monkeypatch)
    for i in range(8):
        engine.submit(f"bad{i}", [*healthy(100 + i, 90), POISON, *healthy(200 + i, 30)])
    engine.run()
    for i in range(8):
        finish = engine.finish(f"bad{i}")
        assert (finish.status, finish.message) == (500, FAULT)
    assert not_finite(engine) == 0
    for i in range(40):
        engine.submit(str(i), healthy(i, 20 + i), **HEALTHY)
    engine.run()
    assert [engine.tokens(str(i)) for i in range(40)] == forty_answers


@pytest.mark.parametrize("depth", [0, 1])
def test_a_fault_in_an_early_chunk_ends_the_request_before_its_pages_are_cached_or_published(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    engine = poisoned(Harness(tiny, chunked_prefill_size=16, overlap_depth=depth), monkeypatch)
    ids = [*healthy(1, 20), POISON, *healthy(2, 60)]
    engine.submit("bad", ids)
    engine.run()
    finish = engine.finish("bad")
    assert finish.message == FAULT
    assert engine.steps < 6, "the other chunks are not computed"
    assert not_finite(engine) == 0
    cached = [token for block in engine.reporter.blocks() for token in block["tokens"]]
    published = [token for update in engine.updates for event in update.events for token in event.token_ids]
    assert cached == published == ids[:16], "only the chunk before the fault"


def test_a_request_that_overflows_while_it_decodes_leaves_its_neighbours_alone(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Harness(tiny).generate("x", healthy(1, 10), **HEALTHY)
    engine = poisoned(Harness(tiny), monkeypatch)
    engine.submit("bad", healthy(2, 10), max_new_tokens=20, logit_bias={POISON: 1e9})
    engine.submit("good", healthy(1, 10), **HEALTHY)
    engine.run()
    finish = engine.finish("bad")
    assert finish.message == FAULT
    assert engine.tokens("good") == expected
    assert not_finite(engine) == 0


def test_keys_that_overflow_fail_the_request_even_where_its_logits_are_finite(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such keys may hide behind a weight of zero; a request that continues the prefix would meet them."""
    engine = Harness(tiny)
    store = engine.executor.pool.store

    def overflowing(layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        store(layer, slots, torch.where(k == k[0], k, -torch.inf), v)

    monkeypatch.setattr(engine.executor.pool, "store", overflowing)
    engine.submit("bad", healthy(1, 12))
    engine.run()
    finish = engine.finish("bad")
    assert finish.message == FAULT
    assert engine.reporter.blocks() == []
    assert not_finite(engine) == 0


def test_a_prompt_whose_logprobs_are_not_numbers_is_an_error(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Harness(tiny)
    engine.spoil_logits(monkeypatch, slice(1, 2), torch.inf)
    engine.submit("a", healthy(1, 10), return_logprob=True, logprob_start_len=0)
    engine.run()
    finish = engine.finish("a")
    assert finish.message == FAULT


def test_a_request_aborted_while_its_faulty_batch_is_in_flight_leaves_clean_pages(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = poisoned(Harness(tiny, overlap_depth=1), monkeypatch)
    engine.submit("other", healthy(3, 4), max_new_tokens=9)
    engine.submit("bad", [*healthy(1, 10), POISON])
    engine.step()
    engine.abort("bad")
    engine.run()
    finish = engine.finish("bad")
    assert finish.type == "abort"
    assert not_finite(engine) == 0
    assert all(POISON not in block["tokens"] for block in engine.reporter.blocks())


def test_pages_that_cannot_be_cleaned_do_not_stop_the_scheduler(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = poisoned(Harness(tiny), monkeypatch)
    monkeypatch.setattr(engine.executor.pool, "clear", lambda pages: 1 / 0)
    engine.submit("bad", [*healthy(1, 10), POISON])
    engine.run()
    expected = Harness(tiny).generate("x", healthy(1, 9), **HEALTHY)
    assert engine.generate("a", healthy(1, 9), **HEALTHY) == expected


# ---- garbage in unused memory -----------------------------------------------------------------------------

CONFIGS: list[dict[str, Any]] = [
    {"page_size": page_size, "attention_backend": backend} | settings
    for page_size, backend in [(1, "torch_sdpa"), (16, "torch_sdpa"), (64, "torch_sdpa"), (16, "dense")]
    for settings in (
        {},
        {"overlap_depth": 1, "prefills_in_a_row": 2},
        {"chunked_prefill_size": 64, "schedule_policy": "lpm", "eviction_policy": "lfu", "mixed_chunk": True},
    )
]


def fill_free_pages(engine: Harness, garbage: torch.Tensor) -> None:
    """Before every batch, overwrite each page that neither a request nor the tree owns, and the part of each request's
    last page that it has not written yet."""
    launch = engine._compute

    def launch_on_garbage(batch: Batch) -> Launched:
        pool = engine.executor.pool
        free = torch.from_numpy(np.append(engine.cache.pool._is_free, True))  # and the scratch page
        for part in (*pool.keys, *pool.values):
            part[free] = garbage[torch.arange(part[free].numel()) % len(garbage)].view_as(part[free])
            slots = part.view(-1, *part.shape[2:])
            for req, end in zip(batch.reqs, batch.ends, strict=True):
                last = int(engine.table.pages[req.row, (end - 1) // pool.page_size])
                used = last * pool.page_size + (end - 1) % pool.page_size + 1
                tail = slots[used : (last + 1) * pool.page_size]
                tail.copy_(garbage[torch.arange(tail.numel()) % len(garbage)].view_as(tail))
        return launch(batch)

    engine._compute = launch_on_garbage  # type: ignore[method-assign]


def traffic(tiny: Path, settings: dict[str, Any], garbage: list[float], seed: int) -> dict[str, list[TokenOut]]:
    """Return the engine's messages while prompts with common beginnings arrive, decode, leave and are retracted."""
    engine = Harness(tiny, max_total_tokens=384, max_running_requests=8, **settings)
    engine.ratio.initial = engine.ratio.minimum = engine.ratio.value = 0.1  # optimistic: retractions happen
    fill_free_pages(engine, torch.tensor(garbage))
    rng = random.Random(seed)
    families = [prompt(family, 150) for family in range(3)]
    for rid in range(24):
        ids = rng.choice(families)[: rng.randint(1, 150)] + prompt(100 + rid, rng.randint(1, 9))
        wanted = {"return_logprob": True, "logprob_start_len": rng.choice([-1, 0, len(ids) // 2])}
        engine.submit(str(rid), ids, max_new_tokens=rng.choice([1, 5, 60]), **wanted)
        for _ in range(rng.randint(0, 3)):
            engine.step()
        if rng.random() < 0.1:
            engine.abort(str(rid))
    engine.run()
    return engine.outs


@pytest.mark.parametrize("settings", CONFIGS, ids=str)
def test_unused_memory_changes_no_bit_of_any_answer(tiny: Path, settings: dict[str, Any]) -> None:
    seed = CONFIGS.index(settings)
    clean = traffic(tiny, settings, [0.0], seed)
    if settings["page_size"] == 1:  # larger pages leave too few requests at once for that
        assert any(out.retractions for outs in clean.values() for out in outs)
    garbage = [torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 1.0, torch.nan]
    assert traffic(tiny, settings, garbage, seed) == clean
