"""Limits of a request in tokens, places and seconds: a request beyond one is refused, others are served."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.runtime_engine import Harness, prompt
from treeline_runtime.config import ConfigError, SchedulerConfig
from treeline_runtime.core import Req
from treeline_runtime.messages import FinishReason, GenerateReq, SamplingParams
from treeline_runtime.scheduler.waiting import TimeLimits


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# ---- what can never fit ---------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("limit", [{"max_total_tokens": 48}, {"context_length": 48, "max_total_tokens": 1024}])
@pytest.mark.parametrize("depth", [0, 1])
def test_at_every_bound_a_prompt_is_refused_or_served(
    tiny: Path, limit: dict[str, int], page_size: int, depth: int
) -> None:
    engine = Harness(tiny, page_size=page_size, overlap_depth=depth, chunked_prefill_size=16, **limit)
    for length in (46, 47, 48, 49):
        for new in (0, 1, 2, 500):
            rid = f"{length} {new}"
            engine.submit(rid, prompt(length, length), max_new_tokens=new, return_logprob=True, logprob_start_len=0)
            if page_size == 4:
                engine.run()  # else all at once
    engine.run()
    for rid in engine.outs:
        length, new = map(int, rid.split())
        if length + min(new, 1) > 48:
            assert engine.finish(rid).status == 400, rid
            assert f"the prompt has {length} tokens; at most {47 if new else 48} fit" in str(engine.finish(rid).message)
        else:
            assert engine.finish(rid) == FinishReason("length"), rid
            assert len(engine.tokens(rid)) == min(new, 48 - length)


@pytest.mark.parametrize("depth", [0, 1])
def test_equal_prompts_computed_twice_do_not_hold_memory_twice(tiny: Path, depth: int) -> None:
    """Prompt logprobs make each request compute everything; copies of pages that the tree has are freed at once."""
    engine = Harness(tiny, max_total_tokens=48, overlap_depth=depth, chunked_prefill_size=16)
    for i in range(4):
        engine.submit(str(i), prompt(1, 46), max_new_tokens=2, return_logprob=True, logprob_start_len=0)
    engine.run()
    assert all(engine.finish(str(i)) == FinishReason("length") for i in range(4))


@pytest.mark.parametrize("settings", [{}, {"overlap_depth": 1, "mixed_chunk": True}])
def test_every_request_that_fits_alone_ends_among_others(tiny: Path, settings: dict[str, Any]) -> None:
    """Each request needs the whole pool; none ends with an error, whatever pages the others hold."""
    engine = Harness(tiny, max_total_tokens=64, chunked_prefill_size=16, **settings)
    for i in range(6):
        engine.submit(str(i), prompt(i, 10 * i + 3), max_new_tokens=61 - 10 * i)
        engine.step()
    engine.run()
    assert all(engine.finish(str(i)) == FinishReason("length") for i in range(6))


# ---- what takes too long --------------------------------------------------------------------------------


def test_a_request_that_waits_too_long_is_sent_elsewhere(tiny: Path) -> None:
    clock = Clock()
    engine = Harness(tiny, clock=clock, max_running_requests=1, waiting_timeout=5.0)
    engine.submit("running", prompt(1, 8), max_new_tokens=20)
    engine.submit("first", prompt(2, 8), max_new_tokens=20)
    engine.step()
    clock.now += 3.0
    engine.submit("second", prompt(3, 8), max_new_tokens=2)
    engine.step()
    clock.now += 2.0
    engine.step()
    assert engine.finish("first").status == 503
    assert "waited for 5 s" in str(engine.finish("first").message)
    assert list(engine.prefill.waiting) == ["second"]
    engine.run()
    assert engine.finish("running") == engine.finish("second") == FinishReason("length")


@pytest.mark.parametrize("depth", [0, 1])
def test_a_request_ends_when_its_time_is_over_in_every_state(tiny: Path, depth: int) -> None:
    clock = Clock()
    engine = Harness(
        tiny, clock=clock, overlap_depth=depth, max_running_requests=2, chunked_prefill_size=8, request_timeout=10.0
    )
    engine.submit("decoding", prompt(1, 8), max_new_tokens=400)
    engine.step()
    engine.submit("chunked", prompt(2, 200), max_new_tokens=2)
    engine.submit("waiting", prompt(3, 8), max_new_tokens=2)
    for _ in range(5):
        engine.step()
    assert engine.prefill.chunked is not None
    clock.now += 9.0
    engine.submit("later", prompt(4, 8), max_new_tokens=2)
    engine.step()
    clock.now += 1.0
    engine.run()
    for rid in ("decoding", "chunked", "waiting"):
        assert engine.finish(rid).status == 504, rid
        assert "longer than 10 s" in str(engine.finish(rid).message)
    assert engine.finish("later") == FinishReason("length")
    assert 0 < len(engine.tokens("decoding")) < 20
    assert not engine._time_limits._came, "who has ended is forgotten"


def test_a_retracted_request_has_begun(tiny: Path) -> None:
    """A retracted request may be streaming, so only the time limit of the whole request ends it."""
    clock = Clock()
    engine = Harness(tiny, clock=clock, max_total_tokens=88, waiting_timeout=5.0)
    engine.ratio.value = engine.ratio.initial = engine.ratio.minimum = 0.0
    for i in range(2):
        engine.submit(str(i), prompt(i, 9), max_new_tokens=40)
    while engine.is_idle or not engine.prefill.waiting:
        assert engine.step()
    assert all(req.retractions for req in engine.prefill.waiting.values())
    clock.now += 6.0
    engine.run()
    assert all(engine.finish(str(i)) == FinishReason("length") for i in range(2))


def test_a_limit_must_be_above_zero() -> None:
    for name in ("waiting_timeout", "request_timeout"):
        with pytest.raises(ConfigError, match=f"{name} must be above 0, got 0"):
            SchedulerConfig(model="m", **{name: 0})


LIMIT = st.one_of(st.none(), st.integers(1, 10))


@given(waiting_s=LIMIT, total_s=LIMIT, steps=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=30))
@settings(max_examples=80, deadline=None)
def test_exactly_the_requests_beyond_a_limit_are_found(
    waiting_s: int | None, total_s: int | None, steps: list[tuple[int, int]]
) -> None:
    """It is checked against the definition, for requests that come, begin and end."""
    limits, now = TimeLimits(waiting_s, total_s), 0.0
    came: dict[Req, float] = {}
    waiting: list[Req] = []
    for seconds, action in steps:
        now += seconds
        if action == 0:
            req = Req.of(
                GenerateReq("", [1], SamplingParams()), seed=0, eos_ids=(), max_new_tokens=1, arrival=len(came)
            )
            came[req] = now
            limits.begin(req, now)
            waiting.append(req)
        elif action == 1 and waiting:
            waiting.pop(0).cached_tokens = 0
        elif action == 2 and waiting:
            waiting.pop().cached_tokens = 0  # one that came later
        elif action == 3 and came:
            req = next(iter(came))
            del came[req]
            waiting = [other for other in waiting if other is not req]
            limits.end(req)
        expected = {req: 504 for req, since in came.items() if total_s is not None and now - since >= total_s}
        for req in waiting:
            if waiting_s is not None and now - came[req] >= waiting_s:
                expected.setdefault(req, 503)
        assert {req: end.status for req, end in limits.exceeded(now)} == expected


# ---- a full queue ---------------------------------------------------------------------------------------


def test_a_client_that_fills_the_queue_gives_way_to_others_and_not_to_itself(tiny: Path) -> None:
    engine = Harness(tiny, max_running_requests=1, max_queued_requests=4)
    for i in range(6):
        engine.submit(f"hostile {i}", prompt(i, 8), max_new_tokens=9, client="hostile")
    engine.step()
    assert refused(engine) == ["hostile 5"]
    for rid, client in {"other": "other", "unnamed": None, "other 2": "other", "other 3": "other"}.items():
        engine.submit(rid, prompt(9, 8), max_new_tokens=9, client=client)
    engine.step()
    assert refused(engine) == ["hostile 5", "hostile 4", "hostile 3", "hostile 2", "other 3"]
    engine.run()
    ended = [rid for rid in engine.outs if engine.finish(rid).type == "length"]
    assert sorted(ended) == ["hostile 0", "hostile 1", "other", "other 2", "unnamed"]


def test_an_idle_client_gets_the_reserved_row_when_no_request_may_wait(tiny: Path) -> None:
    engine = Harness(tiny, max_running_requests=8, max_queued_requests=0)
    for i in range(8):
        engine.submit(f"hostile {i}", prompt(i, 8), max_new_tokens=99, client="hostile")
        engine.step()
    assert (len(engine.decode.running), len(engine.prefill.waiting)) == (7, 1)
    engine.submit("other", prompt(9, 8), max_new_tokens=9, client="other")
    engine.step()
    assert refused(engine) == ["hostile 7"]
    assert "other" in engine.decode.running
    engine.abort()
    engine.run()


@given(st.lists(st.sampled_from(["a", "b", "c", None]), max_size=30), st.integers(0, 5))
def test_the_client_with_most_requests_is_refused(tiny: Path, clients: list[str | None], most: int) -> None:
    """It is checked beside a plain list: one request of `a` runs, and no other client gets its row."""
    engine = Harness(tiny, max_running_requests=1, max_queued_requests=most)
    engine.submit("runs", prompt(0, 8), max_new_tokens=99, client="a")
    engine.step()
    waiting, gone = list[tuple[str | None, str]](), list[str]()
    for i, client in enumerate(clients):
        engine.submit(str(i), prompt(i, 8), max_new_tokens=2, client=client)
        waiting.append((client, str(i)))
        if len(waiting) > most:
            held = Counter(other for other, _ in waiting)
            load = {other: (count, other == "a") for other, count in held.items()}
            fullest = max(load, key=load.__getitem__)
            loser = client if load[client] == load[fullest] else fullest
            gone.append(next(rid for other, rid in reversed(waiting) if other == loser))
            waiting = [(other, rid) for other, rid in waiting if rid != gone[-1]]
    engine.step()
    assert refused(engine) == gone
    assert sorted(engine.prefill.waiting) == sorted(rid for _, rid in waiting)
    engine.abort()
    engine.run()


def refused(engine: Harness) -> list[str]:
    """Return the refused requests, in the order of their refusals."""
    ended = {rid: outs[-1].finish for rid, outs in engine.outs.items()}
    return [rid for rid, end in ended.items() if end is not None and end.status == 503]
