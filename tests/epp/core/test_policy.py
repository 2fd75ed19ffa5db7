"""Scores term by term, and the ranking of `predicted_ttft` on them; other policies are in `policies/`."""

import random
from collections import Counter

import numpy as np
import pytest
from treeline_epp.endpoints.load import EndpointLoad
from treeline_epp.endpoints.reservations import ARRIVALS_S, arrivals_per_s
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.picking.policies import Candidates, Policy, create_policy
from treeline_epp.picking.request import Request
from treeline_epp.picking.score import (
    ASSUMED_OUTPUT_TOKENS,
    DECODE_WEIGHT,
    DELAYED_REQUESTS,
    FOLLOWERS,
    Candidate,
    Scored,
    follow_s,
    score,
)
from treeline_wire.load import TreelineLoad


def candidate(
    name: str = "a",
    *,
    load: EndpointLoad | None = None,
    cached: int = 0,
    uncached: int = 1000,
    output: int = ASSUMED_OUTPUT_TOKENS,
    held: int = 0,
    rate: float = 1000.0,
) -> Candidate:
    spec = EndpointSpec(name, f"{name}:1")
    return Candidate(
        spec,
        load or EndpointLoad(),
        rate,
        cached_tokens=cached,
        uncached_tokens=uncached,
        output_tokens=output,
        held_tokens=held,
    )


def reported(**fields: object) -> EndpointLoad:
    load = EndpointLoad()
    load.on_load(TreelineLoad(page_size=16, **fields), now=0.0)  # type: ignore[arg-type]
    return load


def scored(name: str, cost: float, cached: int = 0) -> Scored:
    return Scored(candidate(name, cached=cached), cost)


def ranked(policy: Policy, group: list[Scored]) -> list[Scored]:
    candidates = Candidates(
        np.array([s.cost_s for s in group]),
        np.array([float(s.candidate.cached_tokens) for s in group]),
        lambda at: group[at].candidate.spec.name,
        in_flight=np.array([float(s.candidate.load.in_flight(0.0) or 0) for s in group]),
    )
    return [group[at] for at in policy.rank(Request("id"), candidates, len(group))]


def test_queue_and_prefill_are_tokens_over_rate() -> None:
    load = reported(waiting_uncached_tokens=3000)
    result = score(candidate(load=load, uncached=500), now=0.0)
    assert result.terms["queue_s"] == 3.0
    assert result.terms["prefill_s"] == 0.5
    assert result.ttft_s == 3.5
    assert result.terms["others_s"] == 0.5 * DELAYED_REQUESTS


def test_a_prefill_costs_the_requests_that_arrive_during_it() -> None:
    load = reported(waiting_uncached_tokens=3000)
    for n in range(300):
        load.reservations.close(load.reservations.open(0, n / 10, 0.0))
    per_s = arrivals_per_s(load.reservations.arrivals, load.reservations.arrived_at, 30.0)
    assert per_s == pytest.approx(10, rel=0.1), "ten a second came"
    load.on_load(TreelineLoad(waiting_uncached_tokens=3000), now=30.0)
    terms = score(candidate(load=load, uncached=500), now=30.0).terms
    assert terms["others_s"] == pytest.approx(0.5 * (DELAYED_REQUESTS + per_s * (3.0 + 0.25)))
    quiet = arrivals_per_s(load.reservations.arrivals, load.reservations.arrived_at, 33.0)
    assert quiet == pytest.approx(per_s / 2, rel=0.1), "and none in the last seconds"


@pytest.mark.parametrize(("running", "step_ms", "stays"), [(60, 9.0, True), (200, 20.0, False)])
def test_only_much_slower_outputs_move_a_request_off_its_warm_prefix(running: int, step_ms: float, stays: bool) -> None:
    """2,048 tokens of a prefix on engines that do 52,000 a second."""
    hot, cool = reported(running=1, decode_step_ms=4.0), reported(running=1, decode_step_ms=4.0)
    hot.on_load(TreelineLoad(running=running, decode_step_ms=step_ms), now=0.0)
    cool.on_load(TreelineLoad(running=20, decode_step_ms=5.5), now=0.0)
    warm = score(candidate("warm", load=hot, cached=2048, uncached=128, rate=52_000.0), now=0.0)
    cold = score(candidate("cold", load=cool, uncached=2176, rate=52_000.0), now=0.0)
    policy = create_policy("predicted_ttft", random.Random(0))
    assert (ranked(policy, [cold, warm])[0] is warm) == stays


def test_full_slots_cost_the_time_until_enough_are_free() -> None:
    load = reported(running=8, waiting=1, max_running=8, decode_step_ms=20.0)
    terms = score(candidate(load=load), now=0.0).terms
    assert terms["slots_s"] == pytest.approx(2 * ASSUMED_OUTPUT_TOKENS * 0.020 / 8)
    load = reported(running=6, waiting=1, max_running=8, decode_step_ms=20.0)
    assert score(candidate(load=load), now=0.0).terms["slots_s"] == 0


def test_slow_decoding_costs_what_the_output_takes_longer() -> None:
    load = reported(running=1, decode_step_ms=4.0)
    assert score(candidate(load=load), now=0.0).terms["decode_s"] == 0
    load.on_load(TreelineLoad(running=64, decode_step_ms=9.0), now=0.0)
    assert score(candidate(load=load), now=0.0).terms["decode_s"] == pytest.approx(
        DECODE_WEIGHT * ASSUMED_OUTPUT_TOKENS * 0.005
    )
    assert score(candidate(load=load, output=1), now=0.0).terms["decode_s"] == pytest.approx(DECODE_WEIGHT * 0.005)
    for few in 0, 1:
        load.on_load(TreelineLoad(running=few, decode_step_ms=9.0), now=0.0)
        assert score(candidate(load=load), now=0.0).terms["decode_s"] == 0, "no batch makes its steps long"


def test_an_endpoint_whose_steps_give_several_tokens_is_preferred_for_outputs() -> None:
    plain, guessing = (reported(running=1, decode_step_ms=5.0) for _ in range(2))
    full = {"running": 8, "max_running": 8, "waiting": 1}
    plain.on_load(TreelineLoad(**full, decode_step_ms=9.0, decode_step_tokens=1.0), now=0.0)
    guessing.on_load(TreelineLoad(**full, decode_step_ms=14.0, decode_step_tokens=2.0), now=0.0)
    ours, theirs = (score(candidate(name, load=load), now=0.0) for name, load in (("a", guessing), ("b", plain)))
    assert ours.terms["decode_s"] == pytest.approx(DECODE_WEIGHT * ASSUMED_OUTPUT_TOKENS * 0.002)
    assert theirs.terms["decode_s"] == pytest.approx(DECODE_WEIGHT * ASSUMED_OUTPUT_TOKENS * 0.004)
    assert ours.terms["slots_s"] == pytest.approx(2 * ASSUMED_OUTPUT_TOKENS * 0.007 / 8)
    assert ranked(create_policy("predicted_ttft", random.Random(0)), [theirs, ours])[0] is ours
    guessing.on_load(TreelineLoad(running=8, decode_step_ms=14.0, decode_step_tokens=1.0), now=0.0)
    assert score(candidate(load=guessing), now=0.0).terms["decode_s"] > theirs.terms["decode_s"], "no guess was right"


def test_eviction_costs_only_where_memory_is_short_and_hits_happen() -> None:
    roomy, full = reported(pages_total=1000, pages_used=100), reported(pages_total=1000, pages_used=950)
    for load in (roomy, full):
        load.hit_share = 0.5
    assert score(candidate(load=roomy, uncached=1600), now=0.0).terms["evict_s"] == 0
    evicting = score(candidate(load=full, uncached=1600), now=0.0)
    assert evicting.terms["evict_s"] == pytest.approx((1600 - 50 * 16) * 0.5 / 1000)
    assert evicting.ttft_s == pytest.approx(evicting.cost_s - evicting.terms["evict_s"] - evicting.terms["others_s"])
    full.hit_share = 0.0
    assert score(candidate(load=full, uncached=1600), now=0.0).terms["evict_s"] == 0


def test_cached_pages_are_not_room() -> None:
    load = reported(pages_total=1000, pages_used=10, pages_cached=990)
    load.hit_share = 0.9
    assert score(candidate(load=load, uncached=160), now=0.0).terms["evict_s"] == 0.16


def test_known_cached_tokens_count_as_used() -> None:
    load = reported(pages_total=1000, pages_used=0)
    load.hit_share = 0.9
    assert score(candidate(load=load, uncached=160, held=16_000), now=0.0).terms["evict_s"] == 0.16


def test_an_endpoint_that_refused_is_avoided_for_a_second() -> None:
    load = EndpointLoad()
    load.on_overloaded(now=0.0)
    assert score(candidate(load=load), now=0.25).terms["full_s"] == 0.75


def test_the_cost_is_the_sum_of_its_terms() -> None:
    load = reported(
        running=9,
        max_running=8,
        decode_step_ms=5.0,
        waiting_uncached_tokens=70,
        pages_total=10,
        pages_used=9,
    )
    load.hit_share = 0.3
    terms = score(candidate(load=load), now=0.0).terms
    assert terms["cost_s"] == pytest.approx(
        sum(terms[t] for t in ("queue_s", "prefill_s", "slots_s", "full_s", "decode_s", "others_s", "evict_s"))
    )


def test_sticky_until_saturated() -> None:
    policy = create_policy("predicted_ttft", random.Random(0))
    warm, cold = scored("warm", 1.05, cached=900), scored("cold", 1.0)
    assert [s.candidate.spec.name for s in ranked(policy, [cold, warm])] == ["warm", "cold"]
    warm = scored("warm", 1.3, cached=900)
    assert [s.candidate.spec.name for s in ranked(policy, [cold, warm])] == ["cold", "warm"]


def test_small_differences_do_not_make_a_warm_endpoint_flap() -> None:
    policy = create_policy("predicted_ttft", random.Random(0))
    rng = random.Random(1)
    for _ in range(200):
        warm = scored("warm", 0.010 + rng.random() * 0.004, cached=100)
        cold = scored("cold", 0.010 + rng.random() * 0.004)
        assert ranked(policy, [warm, cold])[0] is warm


def test_an_uncached_prompt_goes_to_the_endpoint_with_the_fewest_requests() -> None:
    policy = create_policy("predicted_ttft", random.Random(0))
    busy, calm = reported(running=9, decode_step_ms=4.0), reported(running=2, decode_step_ms=4.0)
    group = [Scored(candidate("busy", load=busy), 0.010), Scored(candidate("calm", load=calm), 0.012)]
    assert ranked(policy, group)[0] is group[1]
    group[0] = Scored(candidate("busy", load=busy, cached=100), 0.010)
    assert ranked(policy, group)[0] is group[0], "what is cached counts more"


def test_an_attractive_endpoint_costs_the_extra_wait_of_its_followers() -> None:
    arrived_at = np.array([10.0, 10.0, 10.0])
    cost_s = follow_s(np.array([120.0, 15.0, 15.0]), arrived_at, np.array([0.020, 0.005, 0.010]), now=10.0)
    beyond = (120 - 50) / ARRIVALS_S
    assert cost_s == pytest.approx([FOLLOWERS * ARRIVALS_S * beyond * 0.015, 0.0, 0.0])
    alike = follow_s(np.array([50.0, 50.0]), arrived_at[:2], np.array([0.020, 0.005]), now=10.0)
    assert alike.tolist() == [0.0, 0.0], "none gets more than its share"


def test_equal_scores_are_shared_at_random_and_reproducibly() -> None:
    def run() -> list[str]:
        policy = create_policy("predicted_ttft", random.Random(7))
        group = [scored(name, 0.5) for name in "abcd"]
        return [ranked(policy, group)[0].candidate.spec.name for _ in range(400)]

    first = run()
    assert first == run()
    assert min(Counter(first).values()) > 60
