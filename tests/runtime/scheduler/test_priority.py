"""Priorities: who may have one, who goes first, who gives way, and whose pages stay."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.runtime_engine import Harness, prompt
from treeline_runtime.config import ConfigError, SchedulerConfig
from treeline_runtime.core import Req
from treeline_runtime.messages import LARGEST_PRIORITY, FinishReason, GenerateReq, SamplingParams
from treeline_runtime.scheduler.decode import candidates, fewest

pytestmark = pytest.mark.deep

PRIORITY: dict[str, Any] = {"schedule_policy": "priority"}
PREEMPTING: dict[str, Any] = PRIORITY | {"priority_preemption_threshold": 10}


def finish(engine: Harness, rid: str) -> FinishReason:
    found = engine.last(rid).finish
    assert found is not None
    return found


def request(priority: int, output_len: int = 0, *, waited: float = 0.0) -> Req:
    req = Req.of(
        GenerateReq("r", [1, 2], SamplingParams()), seed=0, eos_ids=(), max_new_tokens=8, arrival=0, priority=priority
    )
    req.tokens += [3] * output_len
    req.waited_s = waited
    return req


def order_of_endings(engine: Harness) -> list[str]:
    ended: list[str] = []
    while engine.step():
        ended += [rid for rid, outs in engine.outs.items() if outs[-1].finish is not None and rid not in ended]
    engine.assert_clean()
    return ended


# ---- who may have one -----------------------------------------------------------------------------------


def test_a_priority_is_refused_where_nothing_goes_by_it(tiny: Path) -> None:
    engine = Harness(tiny)
    engine.submit("none", prompt(1, 5), priority=0)
    engine.submit("some", prompt(1, 5), priority=1)
    engine.run()
    assert finish(engine, "none") == FinishReason("length")
    assert finish(engine, "some").status == 400
    assert "does not go by priority" in str(finish(engine, "some").message)


@pytest.mark.parametrize("settings", [PRIORITY, {"eviction_policy": "priority"}])
def test_a_priority_has_bounds(tiny: Path, settings: dict[str, Any]) -> None:
    engine = Harness(tiny, **settings)
    for rid, value in {"most": LARGEST_PRIORITY, "least": -LARGEST_PRIORITY, "more": LARGEST_PRIORITY + 1}.items():
        engine.submit(rid, prompt(1, 5), priority=value)
    engine.run()
    assert [finish(engine, rid).status for rid in ("most", "least", "more")] == [None, None, 400]


def test_preemption_needs_the_policy(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="priority_preemption_threshold needs schedule_policy priority"):
        Harness(tiny, priority_preemption_threshold=3)
    with pytest.raises(ConfigError, match="priority_preemption_threshold must be at least 0, got -1"):
        SchedulerConfig(model="m", schedule_policy="priority", priority_preemption_threshold=-1)


# ---- who goes first -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("low_first", "expected"), [(False, "running high mid low"), (True, "running low mid high")])
def test_which_end_is_urgent_is_a_setting(tiny: Path, low_first: bool, expected: str) -> None:
    engine = Harness(tiny, max_running_requests=1, schedule_low_priority_values_first=low_first, **PRIORITY)
    engine.submit("running", prompt(0, 8), max_new_tokens=2)
    engine.step()
    for rid, value in {"low": -1, "mid": 0, "high": 1}.items():
        engine.submit(rid, prompt(value + 5, 8), max_new_tokens=2, priority=value)
    assert order_of_endings(engine) == expected.split()


def test_in_a_full_queue_the_least_urgent_request_gives_way(tiny: Path) -> None:
    engine = Harness(tiny, max_running_requests=1, max_queued_requests=2, **PRIORITY)
    engine.submit("running", prompt(1, 8), max_new_tokens=20)
    engine.step()
    for rid, value in {"a": 1, "b": 1, "equal": 1, "urgent": 2}.items():
        engine.submit(rid, prompt(2, 8), max_new_tokens=2, priority=value)
    engine.run()
    statuses = {rid: finish(engine, rid).status for rid in engine.outs}
    assert statuses == {"running": None, "a": None, "b": 503, "equal": 503, "urgent": None}


def test_who_has_begun_keeps_its_place_in_a_full_queue(tiny: Path) -> None:
    engine = Harness(tiny, max_running_requests=1, max_queued_requests=1, **PREEMPTING)
    engine.submit("begun", prompt(1, 8), max_new_tokens=20)
    engine.step()
    for rid in ("first", "second"):
        engine.submit(rid, prompt(2, 8), max_new_tokens=9, priority=50)
        engine.step()
    engine.run()
    assert [finish(engine, rid).status for rid in ("begun", "first", "second")] == [None, None, 503]
    assert engine.last("begun").retractions == 1


# ---- who gives way --------------------------------------------------------------------------------------


def test_candidates_are_less_urgent_by_more_than_the_threshold() -> None:
    running = [request(0, 5), request(5, 0), request(-3, 9), request(0, 2), request(0, 1, waited=30.0)]
    found = candidates(request(11), running, threshold=10, starvation_bound=30.0)
    assert found == [running[2], running[3], running[0]], "the least urgent, then who loses least"
    assert candidates(request(10), running, threshold=10, starvation_bound=30.0) == [running[2]]
    assert candidates(request(7), running, threshold=10, starvation_bound=30.0) == []


@given(sizes=st.lists(st.integers(0, 9), max_size=12), needed=st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_the_fewest_that_are_enough(sizes: list[int], needed: int) -> None:
    reqs = [request(size) for size in sizes]
    found = fewest(reqs, lambda some: sum(req.priority for req in some) >= needed)
    assert found == reqs[: len(found)]
    if sum(sizes) < needed or needed == 0:
        assert found == []
    else:
        assert sum(sizes[: len(found)]) >= needed > sum(sizes[: len(found) - 1])


def test_an_urgent_request_of_a_client_that_has_its_share_takes_the_place_of_its_own(tiny: Path) -> None:
    engine = Harness(tiny, max_running_requests=16, max_total_tokens=16384, **PREEMPTING)
    for i in range(16):
        engine.submit(f"low-{i}", prompt(i, 30), max_new_tokens=100, ignore_eos=True, client="ada")
    while len(engine.decode.running) < 14:
        engine.step()
    engine.submit("urgent", prompt(50, 30), max_new_tokens=2, priority=50, client="ada")
    assert order_of_endings(engine)[0] == "urgent"
    assert sum(engine.last(f"low-{i}").retractions for i in range(16)) == 1


@pytest.mark.parametrize("depth", [0, 1])
def test_an_urgent_request_does_not_wait_for_its_clients_turn_and_the_turn_is_spent(tiny: Path, depth: int) -> None:
    engine = Harness(tiny, max_running_requests=1, overlap_depth=depth, **PREEMPTING)
    engine.submit("runs", prompt(1, 8), max_new_tokens=60, client="ada")
    for _ in range(3):
        engine.step()
    engine.submit("cyd's", prompt(2, 8), max_new_tokens=4, client="cyd")
    engine.submit("urgent", prompt(3, 8), max_new_tokens=4, priority=50, client="bob")
    engine.submit("bob's", prompt(4, 8), max_new_tokens=4, client="bob")
    ended = order_of_endings(engine)
    assert ended == ["urgent", "cyd's", "runs", "bob's"]
    assert engine.last("runs").retractions == 1


@pytest.mark.parametrize("settings", [{}, {"overlap_depth": 1}, {"mixed_chunk": True}])
def test_an_urgent_request_takes_the_row_of_another_whose_answer_stays_the_same(
    tiny: Path, settings: dict[str, Any]
) -> None:
    engine = Harness(tiny, max_running_requests=2, **PREEMPTING, **settings)
    for rid, priority in {"low": 0, "mid": 5}.items():
        engine.submit(rid, prompt(priority, 12), max_new_tokens=30, priority=priority, return_logprob=True)
    for _ in range(6):
        engine.step()
    engine.submit("not enough", prompt(7, 12), max_new_tokens=3, priority=10)
    for _ in range(3):
        engine.step()
    assert "not enough" in engine.prefill.waiting
    engine.submit("urgent", prompt(8, 12), max_new_tokens=9, priority=11)
    for _ in range(4):
        engine.step()
    assert "low" in engine.prefill.waiting
    assert set(engine.decode.running) == {"mid", "urgent"}
    engine.run()
    assert [engine.last(rid).retractions for rid in ("low", "mid", "not enough", "urgent")] == [1, 0, 0, 0]
    alone = Harness(tiny)
    for rid, priority in {"low": 0, "mid": 5}.items():
        assert engine.tokens(rid) == alone.generate(rid, prompt(priority, 12), max_new_tokens=30, return_logprob=True)
        assert [t for _, t in engine.logprobs(rid)] == engine.tokens(rid)


@pytest.mark.parametrize("depth", [0, 1])
def test_as_many_give_way_as_the_memory_of_an_urgent_prompt_takes(tiny: Path, depth: int) -> None:
    engine = Harness(tiny, max_total_tokens=128, overlap_depth=depth, **PREEMPTING)
    for i in range(5):
        engine.submit(str(i), prompt(i, 12), max_new_tokens=8, ignore_eos=True)
    for _ in range(3):
        engine.step()
    assert len(engine.decode.running) == 5
    engine.submit("urgent", prompt(9, 45), max_new_tokens=8, priority=11)
    engine.run()
    gave_way = [engine.last(str(i)).retractions for i in range(5)]
    assert 0 < sum(gave_way) < 5
    assert max(gave_way) == 1
    alone = Harness(tiny)
    for i in range(5):
        assert engine.tokens(str(i)) == alone.generate(str(i), prompt(i, 12), max_new_tokens=8)


def test_nobody_gives_way_in_vain(tiny: Path) -> None:
    """The memory is held by a request that is as urgent: taking another's would not be enough."""
    engine = Harness(tiny, max_total_tokens=128, **PREEMPTING)
    engine.submit("large", prompt(1, 70), max_new_tokens=20, priority=11)
    engine.submit("low", prompt(2, 8), max_new_tokens=8)
    for _ in range(3):
        engine.step()
    engine.submit("urgent", prompt(3, 60), max_new_tokens=8, priority=11)
    engine.run()
    assert engine.last("low").retractions == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_a_prompt_in_chunks_gives_way_and_keeps_what_was_computed(tiny: Path, depth: int) -> None:
    engine = Harness(tiny, chunked_prefill_size=16, overlap_depth=depth, **PREEMPTING)
    engine.submit("long", prompt(1, 200), max_new_tokens=3, return_logprob=True, logprob_start_len=100)
    for _ in range(4):
        engine.step()
    assert engine.prefill.chunked is not None
    engine.submit("urgent", prompt(2, 8), max_new_tokens=3, priority=11)
    ended = order_of_endings(engine)
    assert ended == ["urgent", "long"]
    assert engine.stats.total_prefill_tokens == 208, "nothing was computed twice"
    assert engine.tokens("long") == Harness(tiny).generate("x", prompt(1, 200), max_new_tokens=3)
    scored = engine.outs["long"][0].input_token_logprobs
    assert scored is not None
    assert [t for _, t in scored] == prompt(1, 200)[100:]


def test_who_waited_too_long_is_not_interrupted_again(tiny: Path) -> None:
    """Urgent requests without end: the other one runs at last, and to its end."""
    now = [0.0]
    engine = Harness(tiny, clock=lambda: now[0], max_running_requests=1, starvation_bound=20.0, **PREEMPTING)
    engine.submit("low", prompt(1, 8), max_new_tokens=20)
    engine.step()
    for i in range(300):
        if not engine.prefill.waiting or set(engine.prefill.waiting) == {"low"}:
            engine.submit(str(i), prompt(2, 8), max_new_tokens=4, priority=50)
        engine.step()
        now[0] += 1.0
        if "low" in engine.outs and engine.last("low").finish is not None:
            break
    assert finish(engine, "low") == FinishReason("length")
    assert engine.last("low").retractions > 0
    assert engine.steps < 20 + 60
    engine.run()


def test_an_abort_of_who_gave_way(tiny: Path) -> None:
    engine = Harness(tiny, max_running_requests=1, **PREEMPTING)
    engine.submit("low", prompt(1, 8), max_new_tokens=20)
    engine.step()
    engine.submit("urgent", prompt(2, 8), max_new_tokens=9, priority=50)
    engine.step()
    engine.abort("low")
    engine.abort("urgent")
    engine.run()
    assert finish(engine, "low").type == finish(engine, "urgent").type == "abort"


# ---- whose pages stay -----------------------------------------------------------------------------------


def test_pages_of_urgent_requests_stay_longer(tiny: Path) -> None:
    engine = Harness(tiny, max_total_tokens=160, eviction_policy="priority")
    engine.generate("urgent", prompt(1, 40), max_new_tokens=1, priority=3)
    for i in range(2, 8):
        engine.generate(str(i), prompt(i, 40), max_new_tokens=1, priority=-1)
    engine.generate("again", prompt(1, 40), max_new_tokens=1)
    assert engine.last("again").cached_tokens == 36
    engine.generate("others", prompt(2, 40), max_new_tokens=1)
    assert engine.last("others").cached_tokens == 0


@pytest.mark.parametrize("seed", range(3))
def test_random_priorities_change_no_answer(tiny: Path, seed: int) -> None:
    rng = random.Random(seed)
    settings: dict[str, Any] = {"max_total_tokens": 200, "chunked_prefill_size": 16, "overlap_depth": seed % 2}
    settings |= {"max_running_requests": 3, "eviction_policy": "priority", "mixed_chunk": seed == 2}
    engine, alone = Harness(tiny, **PREEMPTING, **settings), Harness(tiny)
    engine.ratio.initial = engine.ratio.minimum = engine.ratio.value = 0.1  # optimistic: retractions happen
    asked = {str(i): prompt(i % 7, rng.randint(1, 60)) for i in range(16)}
    aborted = rng.sample(sorted(asked), 3)
    for rid, ids in asked.items():
        client = rng.choice(["ada", "bob", None])
        engine.submit(rid, ids, max_new_tokens=20, priority=rng.choice([0, 0, 11, 22, -20]), client=client)
        for _ in range(rng.randint(0, 6)):
            engine.step()
        if rng.random() < 0.3 and aborted:
            engine.abort(aborted.pop())
    engine.run()
    assert sum(engine.last(rid).retractions for rid in asked) > 1
    for rid, ids in asked.items():
        expected = alone.generate(rid, ids, max_new_tokens=20)
        found = engine.tokens(rid)
        assert found == (expected if finish(engine, rid).type == "length" else expected[: len(found)])
