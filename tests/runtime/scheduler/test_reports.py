"""Load and cache updates."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runtime_engine import Harness, prompt
from treeline_runtime.messages import AbortReq, DrainReq, FlushReq
from treeline_runtime.published import CacheUpdate, Cleared, Removed, Stored
from treeline_runtime.scheduler.launched import Sampled
from treeline_runtime.scheduler.reports import SchedulerStats


def test_load_is_published_after_each_step_that_changes_it(tiny: Path) -> None:
    engine = Harness(tiny, max_running_requests=2, chunked_prefill_size=16)
    engine.generate("warm", prompt(1, 33), max_new_tokens=1)
    engine.loads.clear()
    for i in range(3):
        engine.submit(str(i), prompt(1, 32) + prompt(10 + i, 12), max_new_tokens=4)
    engine.step()
    load = engine.loads[-1]
    assert (load.running, load.waiting) == (2, 1)
    assert load.waiting_uncached_tokens == (12 - 4) + 12, "the rest of the second, and the third"
    assert load.pages_total == 256
    assert load.tokens_used == load.pages_used * 4 > 0
    assert load.pages_used + load.pages_cached + engine.cache.pool.num_free == load.pages_total
    assert load.max_running == 2
    assert load.prefill_tokens_per_s > 0
    engine.run()
    load = engine.loads[-1]
    assert (load.running, load.waiting, load.waiting_uncached_tokens, load.pages_used) == (0, 0, 0, 0)
    assert load.pages_cached == engine.cache.tree.num_pages > 0
    assert load.total_prefill_uncached_tokens == 33 + 3 * 12
    assert load.total_prefill_busy_us > 0
    assert load.decode_step_ms > 0
    count = len(engine.loads)
    engine.step()
    assert len(engine.loads) == count, "an unchanged load was published"
    for id in ("x", "y"):
        engine.inbox.append(FlushReq(id))
        engine.step()
    assert [load.pages_cached for load in engine.loads[count:]] == [0], "only the first flush changes anything"


def test_shared_tokens_of_waiting_prompts_are_reported_once(tiny: Path) -> None:
    engine = Harness(tiny, max_running_requests=1, chunked_prefill_size=16)
    engine.submit("running", prompt(8, 4), max_new_tokens=40)
    engine.step()
    shared, own = prompt(1, 64), [prompt(10 + i, 12) for i in range(4)]
    for i in range(4):
        engine.submit(str(i), shared + own[i], max_new_tokens=2)
    engine.submit("alone", shared + own[0], max_new_tokens=2, namespace="another")
    engine.submit("short", shared[:32], max_new_tokens=2)
    engine.step()
    assert engine.loads[-1].waiting_uncached_tokens == 64 + 4 * 12 + 76 + 32, "no request waits for 31 tokens"
    engine.inbox.append(AbortReq("0"))
    engine.step()
    assert engine.loads[-1].waiting_uncached_tokens == 64 + 3 * 12 + 76 + 32, "the next one has to compute it"
    engine.inbox.append(AbortReq("running"))
    engine.step()
    assert engine.prefill.chunked is not None
    assert engine.loads[-1].waiting_uncached_tokens == 48 + 3 * 12 + 76 + 16, "a first chunk is done"
    engine.run()
    engine.assert_clean()


def test_draining_is_reported_at_once(tiny: Path) -> None:
    engine = Harness(tiny)
    engine.inbox.append(DrainReq())
    engine.step()
    assert engine.loads[-1].draining
    assert engine.generate("a", prompt(1, 5), max_new_tokens=2), "requests go on"


def test_the_first_prefill_and_decode_step_do_not_count_for_the_speed() -> None:
    stats = SchedulerStats()
    stats.on_prefill(30, 2.0)
    stats.on_decode(1, [Sampled([1])], 1.0)
    assert (stats.prefill_tokens_per_s, stats.decode_step_ms) == (0.0, 0.0)
    assert (stats.total_prefill_tokens, stats.total_prefill_busy_us) == (30, 2_000_000)
    stats.on_prefill(450, 0.25)
    stats.on_decode(1, [Sampled([1])], 0.01)
    assert (stats.prefill_tokens_per_s, stats.decode_step_ms) == (pytest.approx(1800), pytest.approx(10))


def test_prefill_is_weighed_by_tokens_and_the_past_is_forgotten() -> None:
    stats = SchedulerStats()
    stats.on_prefill(1, 1.0)
    stats.on_decode(1, [Sampled([1])], 1.0)
    assert stats.prefill_tokens_per_s == 0.0
    stats.on_prefill(1000, 1.0)
    assert stats.prefill_tokens_per_s == pytest.approx(1000)
    stats.on_prefill(1500, 1.0)
    kept = 0.9 * 1000
    assert stats.prefill_tokens_per_s == pytest.approx((kept * 1000 + 1500 * 1500) / (kept * 1.0 + 1500 * 1.0))
    for _ in range(100):
        stats.on_prefill(2000, 1.0)
    assert stats.prefill_tokens_per_s == pytest.approx(2000, rel=1e-3)
    stats.on_decode(1, [Sampled([1])], 0.010)
    assert stats.decode_step_ms == pytest.approx(10)
    stats.on_decode(10, [Sampled([1] * 5), Sampled([1])], 0.020)
    assert stats.decode_step_ms == pytest.approx(11)
    assert stats.decode_step_tokens == pytest.approx(0.9 * 1 + 0.1 * 3)


def test_an_engine_that_finds_prompts_in_its_cache_does_not_look_slow() -> None:
    stats = SchedulerStats()
    stats.on_prefill(1, 1.0)
    for _ in range(20):
        stats.on_prefill(2000, 0.005 + 2000 / 50_000)
    before = stats.prefill_tokens_per_s
    for _ in range(100):
        stats.on_prefill(100, 0.005 + 100 / 50_000)
    assert stats.prefill_tokens_per_s > 0.8 * before
    for _ in range(1000):
        stats.on_prefill(100, 0.01)
    assert stats.prefill_tokens_per_s == pytest.approx(10_000, rel=0.02), "it does nothing else"
    stats.on_prefill(2000, 0.045)
    assert stats.prefill_tokens_per_s > 0.5 * before, "one long prompt shows what it can do"


def test_many_short_prompts_are_one_measurement() -> None:
    stats = SchedulerStats()
    stats.on_prefill(1, 1.0)
    for _ in range(10):
        stats.on_prefill(1500, 1.0)
    told = set[float]()
    for _ in range(300):
        stats.on_prefill(15, 0.02)
        told.add(stats.prefill_tokens_per_s)
    assert 1 < len(told) <= 4, "a hundred are as many tokens as a usual step has"


def mirror(updates: list[CacheUpdate]) -> dict[int, int | None]:
    """Rebuild hash → parent from the events alone."""
    held: dict[int, int | None] = {}
    for update in updates:
        for event in update.events:
            if isinstance(event, Cleared):
                held.clear()
            elif isinstance(event, Removed):
                for digest in event.block_hashes:
                    del held[digest]
            else:
                parent = event.parent_hash
                for digest in event.block_hashes:
                    held[digest], parent = parent, digest
    return held


def test_events_reproduce_the_tree(tiny: Path) -> None:
    engine = Harness(tiny, max_total_tokens=160, chunked_prefill_size=16)
    for i in range(12):
        engine.submit(str(i), prompt(i % 5, 30 + i), max_new_tokens=5 + i)
        engine.step()
    engine.run()
    blocks = {int(b["hash"]): b["parent"] and int(b["parent"]) for b in engine.reporter.blocks()}
    assert mirror(engine.updates) == blocks
    engine.inbox.append(FlushReq("f"))
    engine.step()
    assert mirror(engine.updates) == {}


def test_sampled_tokens_are_marked(tiny: Path) -> None:
    engine = Harness(tiny)
    out = engine.generate("a", prompt(1, 10), max_new_tokens=9)
    stored = [e for update in engine.updates for e in update.events if isinstance(e, Stored)]
    assert [e.token_ids for e in stored] == [prompt(1, 10)[:8], prompt(1, 10)[8:] + out[:6]]
    assert [e.output_from for e in stored] == [8, 2]
    assert stored[1].parent_hash == stored[0].block_hashes[-1]
    assert len(engine.updates) == 2, "one update per step"
