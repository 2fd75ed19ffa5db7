"""A simulated fleet with the picker's own core: its counts, its recovery, its repeatability."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from treeline_sim.figures import compare, endless_hit_rate, figures_of
from treeline_sim.model.engine import Engine, EngineConfig
from treeline_sim.model.text import Text
from treeline_sim.picker_core import DEFAULT_POLICY, PickerCore
from treeline_sim.routers import ORACLES, Others, Router, TraceRequest
from treeline_sim.run import Plan, known_policies, simulate
from treeline_sim.simulation import Faults, FleetConfig, Simulation
from treeline_sim.traces import TRACES

ENGINE = EngineConfig(kv_tokens=60_000, block_size=16)
IDLE_S = 8.0
"""Longer than any recovery."""


def trace(count: int = 200, rate: float = 20.0, seed: int = 1) -> list[TraceRequest]:
    """Return a trace of eight groups; at the end, after a pause, a request that is too short to be cached."""
    rng = random.Random(seed)
    groups = [Text(16).extended(1500, rng) for _ in range(8)]
    now, made = 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        prompt = rng.choice(groups).extended(100, rng)
        made.append(TraceRequest(now, prompt, prompt.extended(50, rng), 50))
    last = Text(16).extended(8, rng)
    return [*made, TraceRequest(now + IDLE_S, last, last.extended(2, rng), 2)]


def fleet(faults: Faults, *, pickers: int = 1) -> Simulation:
    def make(_engines: Sequence[Engine | None], number: int) -> Router:
        return PickerCore(DEFAULT_POLICY, 3, seed=number)

    return Simulation(FleetConfig(ENGINE, 3, pickers, faults=faults), make)


def assert_known(simulation: Simulation) -> None:
    """Check that each picker knows exactly the blocks that each engine holds."""
    for router in simulation.routers:
        assert isinstance(router, PickerCore)
        for engine, subscription in zip(simulation.engines, router.subscriptions, strict=True):
            assert engine is not None
            known = router.picker.index.blocks_of(subscription.pod)
            assert len(known) == engine.cache.cached, dict(subscription.counts)
            assert all(block in engine.cache for block in known)
        router.picker.index.check()


@pytest.mark.parametrize(
    "faults",
    [
        Faults(),
        pytest.param(Faults(event_loss=0.2), marks=pytest.mark.deep),
        pytest.param(Faults(engines=((0, 3.0), (1, 4.0)), down_s=1.0), marks=pytest.mark.deep),
        pytest.param(Faults(routers=((0, 5.0),)), marks=pytest.mark.deep),
        Faults(event_loss=0.1, engines=((2, 2.0),), routers=((1, 2.5), (0, 4.0)), down_s=2.0),
    ],
)
def test_the_pickers_index_ends_equal_to_the_engines_caches(faults: Faults) -> None:
    simulation = fleet(faults, pickers=2)
    outcome = simulation.run(trace())
    assert_known(simulation)
    assert len(outcome.served) == 201
    assert all((served.ttft_s is not None) or served.error for served in outcome.served)
    if not faults.engines:
        assert not any(served.error for served in outcome.served)


def test_only_the_requests_of_an_engine_that_dies_fail() -> None:
    simulation = fleet(Faults(engines=((1, 2.0),), down_s=2.0))
    outcome = simulation.run(trace(rate=60.0))
    failed = [served for served in outcome.served if served.error]
    assert failed
    assert all(served.endpoint == 1 and served.at < 2.1 for served in failed)
    assert any(served.endpoint == 1 for served in outcome.served if served.at < 2.0)


def test_a_restarted_engine_is_used_again() -> None:
    simulation = fleet(Faults(engines=((1, 1.0),), down_s=1.0))
    others = [replace(request, at=request.at + 2.5) for request in trace(seed=2)]  # of uncached groups
    outcome = simulation.run(sorted([*trace(), *others], key=lambda request: request.at))
    assert any(served.endpoint == 1 and not served.error for served in outcome.served if served.at > 2.1)


@pytest.mark.parametrize(
    "policy", [one if one == DEFAULT_POLICY else pytest.param(one, marks=pytest.mark.deep) for one in known_policies()]
)
def test_the_same_seed_is_the_same_run(policy: str) -> None:
    plan = Plan(TRACES["zipf"], endpoints=4, requests=50, seed=7, faults=Faults(event_loss=0.05))
    first = simulate(plan, policy)
    assert first == simulate(plan, policy)
    assert first != simulate(Plan(TRACES["zipf"], endpoints=4, requests=50, seed=8), policy)
    assert (first.requests, first.errors) == (50, 0)


def test_pickers_exchange_their_requests_in_flight() -> None:
    plan = Plan(TRACES["bursts"], endpoints=4, requests=320, pickers=3)
    together = simulate(plan, DEFAULT_POLICY)
    assert together == simulate(plan, DEFAULT_POLICY)

    class Alone(PickerCore):
        def join(self, others: Others) -> None: ...

    def make(_engines: Sequence[Engine | None], number: int) -> Router:
        return Alone(DEFAULT_POLICY, plan.endpoints, seed=1000 * plan.seed + number)

    alone = figures_of(DEFAULT_POLICY, Simulation(plan.fleet, make).run(plan.generate()))
    one = simulate(replace(plan, pickers=1), DEFAULT_POLICY)
    assert alone.hit_rate < 0.95 * one.hit_rate, "siblings go to several, each of which knows nothing of the others"
    assert together.hit_rate > 0.98 * one.hit_rate


def test_restarts_and_lost_datagrams_leave_nothing_behind() -> None:
    simulation = fleet(Faults(event_loss=0.1, routers=((0, 3.0), (1, 5.0))), pickers=3)
    simulation.run(trace(rate=40.0))
    for router in simulation.routers:
        assert isinstance(router, PickerCore)
        gossip = router.gossip
        assert gossip is not None
        gossip.check()
        assert (gossip.in_step, gossip.unplaced) == (2, 0)
        assert gossip.elsewhere <= 1, "the end of the last request may be on its way"


def test_prefix_routing_is_near_the_oracles_and_far_from_random() -> None:
    plan = Plan(TRACES["150x5"], endpoints=4, requests=250)
    found = [simulate(plan, policy) for policy in (DEFAULT_POLICY, "random", *ORACLES)]
    ours, blind, oracle, most = found
    assert ours.hit_rate > 0.95 * oracle.hit_rate, "who looks for the first token as we do, and knows all"
    assert ours.hit_rate > 0.9 * most.hit_rate
    assert ours.hit_rate > 1.5 * blind.hit_rate
    assert oracle.ttft_p90_ms < blind.ttft_p90_ms
    assert most.hit_rate <= endless_hit_rate(plan.generate(), plan.engine.block_size)
    one, other, *_ = compare(found)
    assert one.ttft_p90_vs_best == pytest.approx(ours.ttft_p90_ms / blind.ttft_p90_ms)
    assert other.hit_vs_oracle == pytest.approx(blind.hit_rate / max(oracle.hit_rate, most.hit_rate))


def test_without_an_endpoint_requests_are_refused() -> None:
    def make(engines: Sequence[Engine | None], _number: int) -> Router:
        return ORACLES["oracle"](engines, random.Random(1))

    faults = Faults(engines=((0, 0.0),), down_s=1.0)
    outcome = Simulation(FleetConfig(ENGINE, 1, faults=faults), make).run(trace(rate=50.0, count=100))
    assert {served.error for served in outcome.served if served.at < 1.0} == {"no endpoint is up"}
    assert not any(served.error for served in outcome.served if served.at > 1.1)
    found = figures_of("oracle", outcome)
    assert found.errors == sum(bool(served.error) for served in outcome.served)


def test_an_empty_trace_has_figures() -> None:
    found = figures_of("x", fleet(Faults()).run([]))
    assert (found.requests, found.hit_rate, found.ttft_p99_ms) == (0, 0.0, 0.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"endpoints": 0},
        {"routers": 0},
        {"hop_s": -1.0},
        {"faults": Faults(event_loss=1.0)},
        {"faults": Faults(engines=((3, 1.0),))},
        {"faults": Faults(routers=((1, 1.0),))},
    ],
)
def test_an_impossible_fleet_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"fleet|share|delays|there is no"):
        FleetConfig(**({"engine": ENGINE, "endpoints": 3} | wrong))  # type: ignore[arg-type]
