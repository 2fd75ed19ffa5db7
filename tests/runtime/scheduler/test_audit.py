"""The cache audits itself: right answers raise no alarm, wrong pages do, and nobody notices an audit."""

from __future__ import annotations

import logging
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.runtime_engine import Harness, prompt, write_config
from treeline_runtime.messages import AbortReq, DrainReq, FlushReq, SleepReq
from treeline_runtime.published import Stored
from treeline_runtime.scheduler.audit import COARSE_LIMIT, LIMITS, MOST_WAITING, difference
from treeline_runtime.scheduler.scheduler import Scheduler

INSTRUCTION = prompt(1, 64)


@pytest.fixture(scope="module")
def models(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model by its type."""
    return {"float32": tiny, "bfloat16": write_config(tmp_path_factory.mktemp("bfloat16"))}


def audited(tiny: Path, share: float = 1.0, **settings: Any) -> Harness:
    return Harness(tiny, cache_audit=share, **settings)


def spoil(engine: Harness, share: float = 1.0) -> None:
    """Write noise into cached pages."""
    pool, rng = engine.executor.pool._all, random.Random(0)
    pages = [int(page) for node, _ in engine.cache.tree._walk() for page in node.pages if rng.random() < share]
    noise = torch.randn(pool[:, :, pages].shape, generator=torch.Generator().manual_seed(0))
    pool[:, :, pages] = (noise * pool.float().std()).to(pool.dtype)


def told(engine: Harness) -> tuple[int, int, int, bool]:
    """Return what the last load report says of the tree: audited, diverged, dropped, off."""
    counts = engine.loads[-1].audits["tree"]
    return counts.audited, counts.diverged, counts.dropped, counts.off


def leave_one_waiting(engine: Harness) -> None:
    """Answer a request with a cached prefix, and do not yet audit it."""
    engine.generate("first", INSTRUCTION + prompt(2, 8), max_new_tokens=1)
    engine.submit("second", INSTRUCTION + prompt(3, 30), max_new_tokens=1)
    while "second" not in engine.outs:
        engine.step()
    assert engine.is_idle
    assert len(engine.audits._waiting) == 1


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"overlap_depth": 1, "mixed_chunk": True, "chunked_prefill_size": 24},
        {"dtype": "bfloat16", "chunked_prefill_size": 32},
    ],
    ids=str,
)
def test_hundreds_of_right_answers_raise_no_alarm(models: dict[str, Path], settings: dict[str, Any]) -> None:
    model = models[settings.get("dtype", "float32")]
    engine, rng = audited(model, max_total_tokens=640, **settings), random.Random(0)
    families = [prompt(seed, 90) for seed in range(4)]
    for i in range(50):
        for j in range(rng.randint(1, MOST_WAITING)):
            ids = rng.choice(families)[: rng.randint(1, 90)] + prompt(1000 * i + j, rng.randint(1, 9))
            engine.submit(f"{i} {j}", ids, max_new_tokens=rng.randint(1, 9), temperature=rng.choice([0.0, 1.0]), seed=i)
        if rng.random() < 0.5:
            engine.step()
            engine.retract_one(rng)
        engine.run()
    done, diverged, dropped, off = told(engine)
    assert done > 150
    assert (diverged, dropped, off) == (0, 0, False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_page_is_found_and_the_cache_is_off_until_a_flush(
    models: dict[str, Path], dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = audited(models[dtype], dtype=dtype)
    engine.generate("first", INSTRUCTION)
    spoil(engine)
    with caplog.at_level(logging.ERROR):
        engine.generate("wrong", INSTRUCTION + prompt(2, 8))
    assert engine.last("wrong").cached_tokens == 64
    assert told(engine) == (1, 1, 0, True)
    assert "request 'wrong' got another answer with 64 of its 72 tokens from the cache (tree)" in caplog.text
    assert engine.cache.tree.num_pages == 0, "wrong pages do not stay"

    right = Harness(models[dtype], dtype=dtype).generate("right", INSTRUCTION + prompt(2, 8))
    for rid in ("again", "and again"):
        assert engine.generate(rid, INSTRUCTION + prompt(2, 8)) == right
        assert engine.last(rid).cached_tokens == 0
    engine.inbox.append(FlushReq("f"))
    engine.run()
    assert told(engine) == (1, 1, 0, False)
    engine.generate("before", INSTRUCTION + prompt(2, 8))
    assert engine.generate("after", INSTRUCTION + prompt(2, 8)) == right
    assert engine.last("after").cached_tokens == 68
    assert told(engine) == (2, 1, 0, False)


@pytest.mark.parametrize("source", ["host", "disk"])
def test_a_wrong_page_with_a_right_checksum_is_found_and_its_tier_is_off_until_a_flush(
    tiny: Path, tmp_path: Path, source: str
) -> None:
    ids = INSTRUCTION + prompt(2, 8)
    right = Harness(tiny).generate("right", ids)
    engine = audited(tiny, host_cache=1 << 20, disk_cache=str(tmp_path))
    tiers = engine.cache.tiers
    assert tiers is not None
    tiers.rates.allows = lambda _: True  # type: ignore[method-assign]
    store, disk = tiers.store, tiers.store.disk
    assert disk is not None
    for rid in ("first", "second"):
        engine.generate(rid, ids)
    engine.cache.flush()
    noise = np.random.default_rng(0).standard_normal((len(store.host._entries), store.form.nbytes // 4))
    for digest, page in zip(list(store.host._entries), noise.astype(np.float32).view(np.uint8), strict=True):
        checksum = store.form.checksum(digest, page.data)
        if source == "host":
            entry = store.host._entries[digest]
            store._slab.page(entry.slot)[:] = page
            entry.checksum = checksum
        else:
            disk.write(digest, checksum, page)
    if source == "disk":
        store.forget("CPU")
    assert engine.generate("wrong", ids) != right
    assert engine.last("wrong").cached_tokens > 32
    counts = engine.loads[-1].audits
    assert {name for name, found in counts.items() if found.off} == {source}
    assert (counts[source].diverged, store.failures["bad_page"]) == (1, 0)
    assert (store.host.num_pages, disk.num_pages > 0) == (0, source == "host")
    for rid in ("again", "and again"):
        assert engine.generate(rid, ids) == right
    engine.cache.flush()
    assert engine.generate("a third time", ids) == right
    assert engine.last("a third time").cached_tokens == (0 if source == "host" else 68)
    assert (store.host.num_pages > 0, disk.num_pages > 0) == (source == "disk", source == "host")
    engine.inbox.append(FlushReq("f"))
    engine.run()
    assert not any(found.off for found in engine.loads[-1].audits.values())
    for rid in ("x", "y"):
        assert engine.generate(rid, ids) == right
    engine.cache.flush()
    assert engine.generate("z", ids) == right
    assert engine.last("z").cached_tokens == 68
    assert engine.loads[-1].audits["disk"].diverged == (source == "disk")
    assert disk.num_pages > 0
    engine.close()


def test_a_page_from_the_disk_that_a_later_load_finds_on_the_host_is_blamed_on_the_disk(
    tiny: Path, tmp_path: Path
) -> None:
    engine = audited(tiny, share=0.0, host_cache=1 << 20, disk_cache=str(tmp_path))
    tiers = engine.cache.tiers
    assert tiers is not None
    tiers.rates.allows = lambda _: True  # type: ignore[method-assign]
    for rid in ("first", "second"):
        engine.generate(rid, INSTRUCTION)
    found = []
    load = tiers._loaded
    tiers.loads._ended = lambda one, moved: (load(one, moved), found.append(one.req.loaded_from))
    for forgets in (False, True, False):
        engine.cache.flush()
        if forgets:
            tiers.store.forget("CPU")
        engine.generate(str(len(found)), INSTRUCTION)
    assert found == ["CPU", "DISK", "DISK"]
    engine.close()


def test_clients_do_not_choose_what_is_audited(tiny: Path) -> None:
    chosen = []
    for _ in range(2):
        engine = audited(tiny, share=0.5)
        engine.generate("first", INSTRUCTION)
        for i in range(40):
            before = told(engine)[0]
            engine.generate(str(i), INSTRUCTION + prompt(i, 8), max_new_tokens=1)
            chosen.append(told(engine)[0] - before)
    assert chosen[:40] != chosen[40:]


def test_of_many_cached_pages_one_wrong_one_is_enough(tiny: Path) -> None:
    engine = audited(tiny)
    engine.generate("first", prompt(5, 400), max_new_tokens=1)
    spoil(engine, share=0.01)
    engine.generate("second", prompt(5, 400) + prompt(6, 4), max_new_tokens=1)
    assert told(engine) == (1, 1, 0, True)


def test_a_model_that_answers_otherwise_each_time_is_no_lie_of_the_cache(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, generator = audited(tiny), torch.Generator().manual_seed(0)
    logits = engine.executor._model.logits

    def moody(hidden: torch.Tensor, out: None = None) -> torch.Tensor:
        right = logits(hidden)
        return right + torch.randn(right.shape, generator=generator)

    monkeypatch.setattr(engine.executor._model, "logits", moody)
    leave_one_waiting(engine)
    engine.run()
    assert told(engine) == (1, 0, 0, False)


def test_where_rounding_is_magnified_the_limit_is_larger(models: dict[str, Path]) -> None:
    limits = [
        audited(models[dtype], dtype=dtype, **settings).audits._limit
        for dtype in models
        for settings in ({}, {"kv_cache_dtype": "fp8_e4m3"}, {"quantization": "fp8"})
    ]
    assert limits == [
        LIMITS[torch.float32],
        COARSE_LIMIT,
        COARSE_LIMIT,
        LIMITS[torch.bfloat16],
        COARSE_LIMIT,
        COARSE_LIMIT,
    ]


def test_an_audit_yields_to_a_request_after_a_chunk_and_starts_over(tiny: Path) -> None:
    engine = audited(tiny, chunked_prefill_size=16)
    leave_one_waiting(engine)
    for chunk in range(1, 4):
        assert engine.step()
        assert engine.audits.held_pages == 4 * chunk
    engine.submit("urgent", prompt(7, 8), max_new_tokens=2)
    engine.step()
    assert engine.audits.held_pages == 0
    assert engine.tokens("urgent"), "its first token came in the first step"
    engine.run()
    assert told(engine) == (1, 0, 0, False)


def test_an_audit_gives_all_memory_to_requests(tiny: Path) -> None:
    engine = audited(tiny, max_total_tokens=128, chunked_prefill_size=16)
    leave_one_waiting(engine)
    engine.step()
    engine.submit("large", prompt(7, 126), max_new_tokens=2)
    engine.run()
    assert engine.finish("large").type == "length"
    assert told(engine) == (1, 0, 0, False)


def test_nobody_sees_an_audit(tiny: Path) -> None:
    """Neither clients, nor routers, nor the tree."""
    engine = audited(tiny, chunked_prefill_size=16, max_total_tokens=400)
    engine.generate("first", INSTRUCTION)
    ids = INSTRUCTION + prompt(3, 30)
    engine.submit("second", ids, max_new_tokens=3, return_logprob=True, top_logprobs_num=2)
    while not engine.is_idle or engine.inbox:
        engine.step()
    before, tree, updates, reports = engine.load(), set(map(str, engine.reporter.blocks())), len(engine.updates), 0
    while engine.step():
        load = engine.load()
        reports += 1
        assert load.audits != before.audits or load == before
        assert (load.running, load.waiting, load.waiting_uncached_tokens, load.pages_used) == (0, 0, 0, 0)
        assert load.total_prefill_uncached_tokens == before.total_prefill_uncached_tokens
        assert load.prefill_tokens_per_s == before.prefill_tokens_per_s
    assert reports > 3
    assert told(engine)[:2] == (1, 0)
    assert set(map(str, engine.reporter.blocks())) == tree
    assert not any(isinstance(event, Stored) for update in engine.updates[updates:] for event in update.events)
    assert list(engine.outs) == ["first", "second"]
    tops = [top for out in engine.outs["second"] for top in out.output_top_logprobs or ()]
    assert [len(top) for top in tops] == [2, 2, 2], "as many as it asked for"
    without = Harness(tiny)
    without.generate("first", INSTRUCTION)
    without.generate("second", ids, max_new_tokens=3, return_logprob=True, top_logprobs_num=2)
    expected = [top for out in without.outs["second"] for top in out.output_top_logprobs or ()]
    for top, right in zip(tops, expected, strict=True):
        assert [token for _, token in top] == [token for _, token in right]
        assert [logprob for logprob, _ in top] == pytest.approx([logprob for logprob, _ in right], abs=1e-4)


def test_audits_evict_pages_that_nobody_holds_when_the_pool_is_full(tiny: Path) -> None:
    engine = audited(tiny, max_total_tokens=112)
    leave_one_waiting(engine)
    assert engine.cache.pool.num_free < engine.cache.pages_for(94)
    engine.run()
    assert told(engine) == (1, 0, 0, False)


def test_the_same_requests_are_chosen_whatever_else_happens(tiny: Path) -> None:
    chosen = []
    for others in (0, 3):
        engine = audited(tiny, share=0.3)
        engine.audits._secret = b"the same"
        engine.generate("first", INSTRUCTION)
        for i in range(30):
            before = told(engine)[0]
            for j in range(others):
                engine.submit(f"other {i} {j}", prompt(1000 * (i + 1) + j, 20), max_new_tokens=1)
            engine.generate(f"request {i}", INSTRUCTION + prompt(i, 8), max_new_tokens=1)
            chosen.append(told(engine)[0] - before)
    assert chosen[:30] == chosen[30:]
    assert 3 < sum(chosen[:30]) < 20


@pytest.mark.parametrize(
    "settings",
    [{"share": 0.0}, {"share": 1.0, "prefix_cache": "off"}],
    ids=str,
)
def test_without_a_share_or_a_cache_nothing_is_audited(tiny: Path, settings: dict[str, Any]) -> None:
    engine = audited(tiny, **settings)
    for rid in ("one", "two"):
        engine.generate(rid, INSTRUCTION)
    assert all(counts.audited == 0 for counts in engine.loads[-1].audits.values())


def test_a_few_audits_wait_at_most_and_the_oldest_are_dropped(tiny: Path) -> None:
    engine = audited(tiny)
    engine.generate("first", INSTRUCTION, max_new_tokens=1)
    for i in range(MOST_WAITING + 3):
        engine.submit(str(i), INSTRUCTION + prompt(i, 8), max_new_tokens=1)
    engine.run()
    assert told(engine) == (MOST_WAITING, 0, 3, False)


@pytest.mark.parametrize("chunks", [0, 2], ids=["waiting", "begun"])
@pytest.mark.parametrize(
    "message", [DrainReq(), SleepReq("s", 2), FlushReq("f"), AbortReq()], ids=lambda m: type(m).__name__
)
def test_audits_keep_no_operation_waiting(tiny: Path, message: Any, chunks: int) -> None:
    engine = audited(tiny, chunked_prefill_size=16)
    leave_one_waiting(engine)
    for _ in range(chunks):
        engine.step()
    engine.inbox.append(message)
    Scheduler.step(engine)
    assert told(engine) == (0, 0, 1, False)
    assert [reply.ok for reply in engine.replies] == [True] * len(engine.replies)
    assert engine.audits.held_pages == 0
    assert not Scheduler.step(engine)


def test_a_server_that_drains_begins_no_audit(tiny: Path) -> None:
    engine = audited(tiny)
    engine.inbox.append(DrainReq())
    for rid in ("first", "second"):
        engine.generate(rid, INSTRUCTION)
    assert told(engine) == (0, 0, 0, False)


def test_an_audit_that_fails_is_dropped(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = audited(tiny)
    leave_one_waiting(engine)
    with monkeypatch.context() as patch:
        engine.spoil_logits(patch, slice(None))
        engine.run()
    assert told(engine) == (0, 0, 1, False)
    engine.generate("third", INSTRUCTION + prompt(4, 8))
    assert told(engine) == (1, 0, 1, False)


def test_a_request_that_ends_before_its_first_token_is_not_audited(tiny: Path) -> None:
    engine = audited(tiny, chunked_prefill_size=16)
    engine.generate("first", INSTRUCTION)
    engine.submit("second", INSTRUCTION + prompt(2, 40))
    engine.step()
    engine.abort("second")
    engine.run()
    assert told(engine) == (0, 0, 0, False)


scores = st.lists(st.floats(-20, 0), min_size=12, max_size=12)


@given(scores, scores, st.integers(1, 12))
def test_likeliest_tokens_never_differ_more_than_all_tokens_do(a: list[float], b: list[float], most: int) -> None:
    one, other = (dict(sorted(enumerate(x), key=lambda pair: -pair[1])[:most]) for x in (a, b))
    found = difference(one, other)
    assert found == pytest.approx(difference(other, one))
    assert difference(one, one) == 0
    tokens = one.keys() | other.keys()
    assert found <= math.sqrt(sum((a[token] - b[token]) ** 2 for token in tokens) / len(tokens)) + 1e-9
    assert most < 12 or found == pytest.approx(math.dist(a, b) / math.sqrt(12))
