"""Replicas by demand: up at once, and down when a whole window needed no more."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from treeline_operator.api.lifecycle import Autoscaling
from treeline_operator.api.prefill import Prefill
from treeline_operator.plan.replicas import Desired, Heard, History, PromptTarget, Target, desired
from treeline_wire.signals import MOST_COUNT, Asked, PoolSignals, Waiting

TARGET = Target(least=0, most=10, queued_tokens=1000, in_flight_requests=10, ttft_s=1.0, window_s=60.0)
IDLE = PoolSignals(ready=1)

counts = st.integers(0, 12_000) | st.integers(0, MOST_COUNT)
few = st.builds(Waiting, st.integers(0, 40), counts)
asked = st.builds(Asked, few, few, st.integers(0, 5), st.none(), st.none() | st.floats(0, 1e9))
signals = st.builds(
    PoolSignals, asked, st.just({}), st.integers(0, 12), counts, st.integers(0, 200), st.just(0), st.integers(0, 2)
)
heard = st.none() | st.builds(Heard, signals, st.booleans())
targets = st.builds(
    lambda least, more, ttft, window: Target(least, least + more + (least == 0), 1000, 10, ttft, window),
    st.integers(0, 3),
    st.integers(0, 9),
    st.none() | st.floats(0.1, 10),
    st.sampled_from([0.0, 10.0, 60.0]),
)
steps = st.lists(st.tuples(st.floats(0.0, 40.0), heard), min_size=1, max_size=25)


def asked_for(one: Heard | None, target: Target, replicas: int) -> int:
    """Compute the number before any window, independently of the code under test."""
    if one is None:
        wanted = replicas
    else:
        wanted = max(ask.replicas for ask in target.asks(one.pool, replicas))
        if replicas and not one.pool.ready:
            wanted = max(wanted, 1)
        if not one.whole:
            wanted = max(wanted, replicas)
    return sorted((target.least, wanted, target.most))[1]


@given(targets, st.integers(0, 15), steps)
def test_replicas_rise_at_once_and_fall_only_after_a_quiet_window(
    target: Target, replicas: int, said: list[tuple[float, Heard | None]]
) -> None:
    now, history = 100.0, ()
    everything: list[tuple[float, int]] = [(now, replicas)]
    for pause, one in said:
        now += pause
        wanted = asked_for(one, target, replicas)
        if not history:
            everything = [(now, replicas)]
        everything.append((now, wanted))
        found = desired(one, target, replicas, history, now)
        window = [number for at, number in everything if at > now - target.window_s] or [wanted]
        assert target.least <= found.replicas <= target.most
        if wanted >= replicas:
            assert found.replicas == wanted
        else:
            assert found.replicas == min(replicas, max(*window, wanted)) or found.replicas == target.most < replicas
        assert bool(found.why) or found.replicas == replicas
        numbers = [number for _, number in found.history]
        assert numbers == sorted(set(numbers), reverse=True), "no longer than there are replicas"
        history, replicas = found.history, found.replicas


@given(targets, st.integers(0, 15), heard)
def test_correct_replicas_stay(target: Target, replicas: int, one: Heard | None) -> None:
    """After one step up the same demand changes nothing, and after a window nothing ever."""
    history: History = ()
    seen = []
    for now in (0.0, 1.0, 70.0, 140.0, 210.0):
        found = desired(one, target, replicas, history, now)
        history, replicas = found.history, found.replicas
        seen.append(replicas)
    assert seen[-1] == seen[-2]
    assert seen == sorted(seen) or seen[1:] == sorted(seen[1:], reverse=True)


@given(signals, signals, targets)
def test_more_demand_never_asks_for_less(one: PoolSignals, other: PoolSignals, target: Target) -> None:
    target = replace(target, ttft_s=None)
    more = PoolSignals(
        Asked(one.asked.held + other.asked.held, one.asked.missed + other.asked.missed, one.asked.picks),
        ready=one.ready,
        queued_tokens=one.queued_tokens + other.queued_tokens,
        in_flight_requests=one.in_flight_requests + other.in_flight_requests,
        silent=one.silent,
    )
    assert asked_for(Heard(more), target, 1) >= asked_for(Heard(one), target, 1)


@pytest.mark.parametrize(
    ("pool", "replicas", "why"),
    [
        (PoolSignals(ready=1, queued_tokens=2001), 3, "2001 prompt tokens wait, 1000 a replica"),
        (PoolSignals(ready=1, in_flight_requests=11), 2, "11 requests to serve, 10 a replica"),
        (PoolSignals(Asked(held=Waiting(1, 0))), 1, "1 request to serve, 10 a replica"),
        (PoolSignals(Asked(held=Waiting(3, 4500))), 5, "4500 prompt tokens wait, 1000 a replica"),
        (PoolSignals(Asked(missed=Waiting(2, 9000))), 1, "2 requests found no pod ready"),
        (PoolSignals(Asked(picks=4), ready=1), 1, "4 requests came lately"),
        (PoolSignals(Asked(picks=4, ttft_p90_s=1.05), ready=4), 4, "1.05 s, 1 s is wanted"),
        (PoolSignals(Asked(picks=4, ttft_p90_s=1.5), ready=4), 6, "1.5 s, 1 s is wanted"),
        (PoolSignals(Asked(picks=4, ttft_p90_s=60.0), ready=4), 8, "60 s, 1 s is wanted"),
        (PoolSignals(Asked(picks=4, ttft_p90_s=60.0), ready=9), 10, "which asks for 18; 10 is the most"),
    ],
)
def test_replicas_by_each_measure(pool: PoolSignals, replicas: int, why: str) -> None:
    found = desired(Heard(pool), TARGET, pool.ready, (), 0.0)
    assert found.replicas == replicas
    assert why in found.why


def test_pods_of_a_rollout_beside_the_old_ones_ask_for_no_more() -> None:
    pool = PoolSignals(Asked(picks=9, ttft_p90_s=1.0), ready=5)
    assert desired(Heard(pool), TARGET, 4, (), 0.0).replicas == 4


def step(history: History, replicas: int, now: float, pool: PoolSignals | None = IDLE, whole: bool = True) -> Desired:
    return desired(None if pool is None else Heard(pool, whole), TARGET, replicas, history, now)


def test_a_pool_goes_to_zero_when_it_was_idle_for_the_window() -> None:
    found = step((), 1, 0.0, PoolSignals(Asked(picks=1), ready=1))
    for now in (10.0, 59.0):
        found = step(found.history, 1, now)
        assert found.replicas == 1
    found = step(found.history, 1, 61.0)
    assert (found.replicas, "for 60 s demand was no higher" in found.why) == (0, True)


def test_no_pod_is_removed_for_a_window_after_silence_or_without_a_picker() -> None:
    found = step((), 2, 0.0)
    found = step(found.history, 2, 50.0, None)
    assert step(found.history, 2, 100.0).replicas == 2
    assert step(found.history, 2, 111.0).replicas == 0
    assert step(found.history, 2, 111.0, IDLE, whole=False).replicas == 2
    assert step(found.history, 2, 111.0, PoolSignals(queued_tokens=5000), whole=False).replicas == 5


def test_a_woken_pool_does_not_sleep_before_a_pod_was_ready() -> None:
    found = step((), 1, 0.0, PoolSignals())
    found = step(found.history, 1, 500.0, PoolSignals())
    assert found.replicas == 1
    found = step(found.history, 1, 510.0, IDLE)
    assert step(found.history, 1, 571.0, IDLE).replicas == 0


def test_pods_whose_load_is_not_known_stay_while_requests_come() -> None:
    busy = PoolSignals(Asked(picks=1), ready=3, silent=2)
    found = step((), 3, 0.0, busy)
    found = step(found.history, 3, 100.0, busy)
    assert (found.replicas, found.why) == (3, "2 pods do not report their load, and requests arrive")
    found = step(found.history, 3, 130.0, PoolSignals(ready=3, silent=2))
    assert step(found.history, 3, 161.0, PoolSignals(ready=3, silent=2)).replicas == 0


def test_bounds_of_the_spec_hold_without_a_picker() -> None:
    auto = Autoscaling.model_validate(
        {"type": "Picker", "minReplicas": 2, "maxReplicas": 4, "picker": {"ttftMilliseconds": 250, "queuedTokens": 7}}
    )
    target = Target.of(auto)
    assert target == Target(2, 4, 7, 32, 0.25, 300.0)
    assert desired(None, target, 0, (), 0.0).replicas == 2
    assert desired(None, target, 9, (), 0.0).replicas == 4
    assert Target.of(Autoscaling.model_validate({"type": "Picker", "maxReplicas": 1})) == Target(1, 1, 16384, 32)


# ---- the pods that compute prompts ----------------------------------------------------------------------------------

loads = st.floats(0.0, 40.0) | st.just(1e9)
PROMPTS = PromptTarget(1, 20, window_s=60.0)


def prompts(load: float) -> Heard:
    return Heard(PoolSignals(Asked(prompt_load=load), ready=1))


def advice(said: list[Heard | None], replicas: int, pause_s: float = 2.0) -> list[int]:
    """Return the number after each report."""
    history, seen = (), []
    for at, one in enumerate(said):
        _, _, history = found = desired(one, PROMPTS, replicas, history, at * pause_s)
        seen.append(replicas := found.replicas)
    return seen


@given(loads, loads, st.integers(1, 20))
def test_more_prompt_work_never_asks_for_fewer_pods(one: float, other: float, replicas: int) -> None:
    numbers = [desired(prompts(load), PROMPTS, replicas, (), 0.0).replicas for load in sorted((one, other))]
    assert numbers == sorted(numbers)


@given(st.lists(st.floats(0.0, 14.0), min_size=1, max_size=40), st.integers(1, 20))
def test_the_pods_suffice_for_every_load_and_an_idle_side_ends_at_its_minimum(seen: list[float], first: int) -> None:
    told = advice([*map(prompts, seen), *[prompts(0.0)] * 40], first)
    for load, pods in zip(seen, told, strict=False):
        assert load <= 0.7 * 1.1 * pods + 1e-9
    assert told[-1] == PROMPTS.least


@given(st.floats(0.0, 13.0), st.lists(st.floats(0.96, 1.04), min_size=80, max_size=80), st.integers(1, 20))
def test_noise_does_not_move_the_pods_to_and_fro(load: float, noise: list[float], first: int) -> None:
    told = advice([prompts(load * factor) for factor in noise], first)
    settled = told[31:]
    assert settled == sorted(settled, reverse=True)
    assert settled[0] - settled[-1] <= 1


@given(loads, st.integers(1, 20), st.integers(1, 60))
def test_without_reports_the_pods_stay(load: float, first: int, silent: int) -> None:
    before = advice([prompts(load)] * 40, first)
    assert set(advice([*[prompts(load)] * 40, *[None] * silent], first)[40:]) == {before[-1]}
    partial = [Heard(prompts(0.0).pool, whole=False)] * silent
    assert set(advice([*[prompts(load)] * 40, *partial], first)[40:]) == {before[-1]}


def test_bounds_of_the_pods_that_compute_prompts() -> None:
    auto = Autoscaling.model_validate({"type": "Picker", "maxReplicas": 4, "picker": {"scaleDownSeconds": 9}})
    assert PromptTarget.of(Prefill(min_replicas=2, max_replicas=3), auto) == PromptTarget(2, 3, 9.0)
    assert PromptTarget.of(Prefill(), Autoscaling()) == PromptTarget(1, 1000, 300.0)
