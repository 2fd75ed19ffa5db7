"""Admission, retraction, and the pool's size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.runtime_engine import Harness, prompt
from treeline_runtime import memory
from treeline_runtime.config import ConfigError, SchedulerConfig
from treeline_runtime.core import Req
from treeline_runtime.messages import FinishReason, GenerateReq, SamplingParams
from treeline_runtime.models import read_config
from treeline_runtime.scheduler import resolve
from treeline_runtime.scheduler.decode import (
    DECAY_STEPS,
    OUTPUT_CLIP_TOKENS,
    NewTokenRatio,
    cost_pages,
    reserved_pages,
    retraction_order,
)


def request(prompt_len: int, output_len: int = 0, *, max_new: int = 100, ignore_eos: bool = False) -> Req:
    sampling = SamplingParams(max_new_tokens=max_new, ignore_eos=ignore_eos)
    message = GenerateReq(f"{prompt_len}/{output_len}", [1] * prompt_len, sampling)
    req = Req.of(message, seed=0, eos_ids=(), max_new_tokens=max_new, arrival=0)
    req.tokens += [2] * output_len
    return req


# ---- decisions on plain values --------------------------------------------------------------------------


def test_the_ratio_decays_to_its_floor_and_jumps_after_a_retraction() -> None:
    ratio = NewTokenRatio()
    assert ratio.value == 0.7
    for _ in range(DECAY_STEPS + 10):
        ratio.on_decode()
    assert ratio.value == pytest.approx(0.7 * 0.14)
    ratio.on_retract([request(10, 30), request(10, 10)])
    assert ratio.value == pytest.approx((40 + 2 * 20) / 201)
    ratio.on_retract([request(10, 99, max_new=100)])
    assert ratio.value == 1.0
    ratio.on_idle()
    assert ratio.value == 0.7
    assert NewTokenRatio(5.0).value == 1.0


def test_reserves_are_the_rest_of_the_prompt_and_the_expected_output() -> None:
    assert reserved_pages([request(16, max_new=100)], 0.5, 4) == 17, "16 + 50 tokens"
    assert reserved_pages([request(16, 60, max_new=100)], 0.5, 4) == (76 + 20) // 4
    held = request(16, max_new=100)
    held.num_pages = 4
    assert reserved_pages([held], 0.5, 4) == 13
    assert reserved_pages([request(0, max_new=100, ignore_eos=True)], 0.1, 4) == 25, "fixed lengths are believed"
    assert reserved_pages([request(0, max_new=10**9)], 1.0, 1) == OUTPUT_CLIP_TOKENS
    assert cost_pages(request(10, max_new=7), 4, 4) == 4 + 1


def test_least_work_is_lost_first() -> None:
    order = retraction_order([request(10, 5), request(30, 2), request(20, 2), request(50, 9)])
    assert [(r.prompt_len, r.output_len) for r in order] == [(30, 2), (20, 2), (10, 5), (50, 9)]


# ---- in the loop ----------------------------------------------------------------------------------------


def test_large_maxima_are_admitted_together_and_retraction_makes_room(tiny: Path) -> None:
    engine = Harness(tiny, max_total_tokens=160)
    engine.ratio.value = engine.ratio.initial = 0.05
    for i in range(4):
        engine.submit(str(i), prompt(i, 8), max_new_tokens=60)
    peak = 0
    while engine.step():
        peak = max(peak, len(engine.decode.running))
    engine.assert_clean()
    assert peak >= 2
    assert all(engine.last(str(i)).finish == FinishReason("length") for i in range(4))
    assert all(len(engine.tokens(str(i))) == 60 for i in range(4))
    retractions = [engine.last(str(i)).retractions for i in range(4)]
    assert sum(retractions) > 0
    assert all(engine.last(str(i)).cached_tokens == 0 for i in range(4)), "what was cached at the first admission"


def test_conservative_admission_never_retracts(tiny: Path) -> None:
    engine = Harness(tiny, max_total_tokens=160, schedule_conservativeness=10.0)
    for i in range(6):
        engine.submit(str(i), prompt(i, 8), max_new_tokens=60, ignore_eos=True)
    engine.run()
    assert all(engine.last(str(i)).retractions == 0 for i in range(6))


def test_the_last_request_that_cannot_grow_ends_with_500(tiny: Path) -> None:
    engine = Harness(tiny, max_total_tokens=64)
    taken = engine.cache.pool.alloc(8)
    engine.check_integrity = lambda: None  # type: ignore[method-assign]  # pages in the test's hands
    engine.submit("a", prompt(1, 8), max_new_tokens=50)
    for _ in range(100):
        if not engine.step():
            break
    last = engine.last("a")
    assert last.finish is not None
    assert (last.finish.type, last.finish.status) == ("abort", 500)
    assert len(engine.tokens("a")) == 32 - 8 + 1
    engine.cache.pool.free(taken)
    assert len(engine.generate("b", prompt(1, 8), max_new_tokens=50)) == 50


def test_a_chunked_prompt_gives_way_to_the_last_running_request(tiny: Path) -> None:
    engine = Harness(tiny, max_total_tokens=120, chunked_prefill_size=8)
    engine.ratio.value = engine.ratio.initial = engine.ratio.minimum = 0.0
    engine.submit("decoding", prompt(1, 8), max_new_tokens=100)
    engine.submit("long", prompt(2, 100), max_new_tokens=2, return_logprob=True, logprob_start_len=0)
    engine.run()
    assert len(engine.tokens("decoding")) == 100
    assert len(engine.tokens("long")) == 2
    assert engine.last("long").retractions > 0
    scored = engine.outs["long"][0].input_token_logprobs
    assert scored is not None
    assert [t for _, t in scored] == prompt(2, 100), "logprobs of a prompt that began twice come once"


def test_eviction_makes_room_and_is_announced(tiny: Path) -> None:
    engine = Harness(tiny, max_total_tokens=128)
    for i in range(6):
        engine.generate(str(i), prompt(i, 50), max_new_tokens=4)
    kinds = [type(event).__name__ for update in engine.updates for event in update.events]
    assert "Removed" in kinds
    assert engine.generate("again", prompt(5, 50), max_new_tokens=4) == engine.tokens("5")
    assert engine.last("again").cached_tokens == 48


# ---- the pool's size ------------------------------------------------------------------------------------


def test_the_pool_is_sized_from_memory(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, cpu = read_config(tiny), torch.device("cpu")
    per_token = memory.bytes_per_token(model, 4)
    assert per_token == 2 * 2 * 2 * 8 * 4
    assert memory.bytes_per_token(model, 2) == per_token // 2

    def pages(**settings: object) -> int:
        return resolve.num_pages(SchedulerConfig(model="x", **settings), per_token, cpu)  # type: ignore[arg-type]

    assert pages(max_total_tokens=100) == 6
    with pytest.raises(ConfigError, match="less than one page"):
        pages(max_total_tokens=15)
    monkeypatch.setattr(resolve, "_available_memory", lambda: 1 << 20)
    assert pages() == int(0.1 * 2**20) // (per_token * 16)
    assert pages(mem_fraction=0.5) == 2**19 // (per_token * 16)
    monkeypatch.setattr(resolve, "_available_memory", lambda: 1 << 50)
    assert pages() == resolve.CPU_POOL_LIMIT // (per_token * 16)
    monkeypatch.setattr(resolve, "_available_memory", lambda: 100)
    with pytest.raises(ConfigError, match="raise mem_fraction"):
        pages()


def test_this_machines_memory_is_read() -> None:
    assert resolve._available_memory() > 1 << 24
