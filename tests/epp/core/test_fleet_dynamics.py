"""Choices over time, on a small model of engines: bursts, hot prefixes, cold starts, failures."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from support.engine_model import Answered, Asked, Engine, Fleet
from support.epp_core import WIDTH, Prompt
from treeline_epp.picking.decision import Outcome
from treeline_epp.picking.endpoint import ERRORS

RATE = 1000.0
"""Tokens per second of every engine."""
SHARED = [7] * (100 * WIDTH)
"""A prefix that takes 0.4 s."""
OWN = 4 * WIDTH


def sibling(number: int) -> Prompt:
    rng = random.Random(number)
    return Prompt([*SHARED, *(rng.randrange(10, 100) for _ in range(OWN))])


def alone(number: int, tokens: int = 160) -> Prompt:
    rng = random.Random(number)
    return Prompt([rng.randrange(1, 100) for _ in range(tokens)])


def four(first: Callable[[float], float] = lambda _now: RATE, *, tells_rate: bool = True) -> Fleet:
    engines = [Engine("e0", first, tells_rate)]
    return Fleet([*engines, *(Engine(f"e{n}", lambda _now: RATE, tells_rate) for n in range(1, 4))])


def arrivals(per_s: float, start: float, stop: float, make: Callable[[int], Prompt]) -> list[Asked]:
    rng, made, at = random.Random(1), list[Asked](), start
    while at < stop:
        made.append(Asked(at, make(len(made))))
        at += rng.expovariate(per_s)
    return made


def share_of(name: str, answered: list[Answered], start: float, stop: float) -> float:
    then = [one.endpoint for one in answered if start <= one.asked.at < stop]
    return then.count(name) / len(then)


def test_a_burst_of_siblings_stays_with_the_first_until_waiting_costs_more_than_its_prefix() -> None:
    few = four().run([Asked(1.0 + n * 1e-4, sibling(n)) for n in range(8)], 30.0)
    assert len({one.endpoint for one in few}) == 1
    assert max(one.ttft_s for one in few) == pytest.approx(0.4 + 8 * 0.016, rel=0.05)
    many = four().run([Asked(1.0 + n * 1e-4, sibling(n)) for n in range(256)], 30.0)
    shared = Counter(one.endpoint for one in many)
    assert len(shared) == 4
    assert max(shared.values()) < 1.2 * min(shared.values()), "each sees what the others have reserved"
    assert sum(one.computed for one in many) == 4 * len(SHARED) + 256 * OWN, "each computes the prefix once"
    assert max(one.ttft_s for one in many) < 0.4 * (0.4 + 256 * 0.016), "one alone would take 4.5 s"


def test_a_prefix_too_hot_for_one_engine_spreads_to_others() -> None:
    """180 requests a second of 16 ms each: three engines' worth of work."""
    asked = arrivals(180.0, 1.0, 6.0, sibling)
    answered = four().run(asked, 30.0)
    assert len(answered) == len(asked)
    late = sorted(one.ttft_s for one in answered if one.asked.at > 3.0)
    assert late[len(late) * 99 // 100] < 0.15
    assert sum(one.computed for one in answered) <= 4 * len(SHARED) + len(asked) * OWN


def test_a_prefix_stays_on_its_engine_while_no_request_waits() -> None:
    answered = four().run([Asked(1.0 + n * 0.6, sibling(n)) for n in range(20)], 30.0)
    assert len({one.endpoint for one in answered}) == 1
    assert [one.computed for one in answered[1:]] == [OWN] * 19


@pytest.mark.parametrize(
    ("tells_rate", "per_s"), [(True, 15.0), (False, 15.0), (False, 8.0)], ids=["it tells", "answers tell", "few do"]
)
def test_a_cold_start_is_forgotten_in_half_a_minute(tells_rate: bool, per_s: float) -> None:
    """The first six seconds of an engine are twenty times slower than what follows."""
    fleet = four(lambda now: RATE if now > 6.0 else RATE / 20, tells_rate=tells_rate)
    answered = fleet.run(arrivals(per_s, 0.5, 37.0, alone), 120.0)
    assert share_of("e0", answered, 1.0, 6.0) < 0.15, "while it is slow it gets less"
    assert share_of("e0", answered, 13.0, 37.0) > 0.12, "and then up to its quarter"


@pytest.mark.parametrize("tells_rate", [True, False], ids=["it tells its rate", "its answers tell"])
def test_measurements_before_a_quiet_minute_count_little(tells_rate: bool) -> None:
    fleet = four(lambda now: RATE if now > 6.0 else RATE / 20, tells_rate=tells_rate)
    before = arrivals(15.0, 0.5, 6.0, alone)
    rush = [Asked(70.0 + n * 1e-3, alone(1000 + n)) for n in range(40)]
    answered = fleet.run([*before, *rush], 120.0)
    assert share_of("e0", answered, 70.0, 71.0) > 0.12


def test_a_slow_engine_gets_requests_at_its_own_rate() -> None:
    answered = four(lambda _now: RATE / 5).run(arrivals(14.0, 0.5, 60.0, alone), 120.0)
    assert 0.02 < share_of("e0", answered, 20.0, 60.0) < 0.12
    late = sorted(one.ttft_s for one in answered if one.asked.at > 20.0)
    assert late[len(late) // 2] < 0.35


@pytest.mark.parametrize("policy", ["predicted_ttft", "consistent_hashing"])
def test_an_engine_that_resets_every_request_is_probed_by_one_at_a_time(policy: str) -> None:
    """Errors are answers with status 5xx, which is also what a proxy makes of a reset or of no connection at all."""
    fleet = Fleet([Engine(f"e{n}", lambda _now: RATE) for n in range(3)], policy)
    picker, now, probes = fleet.picker, 0.0, list[float]()
    broken_until = 10.0
    while now < 20.0:
        now += 0.05
        for name in fleet.engines:
            picker.on_load(name, fleet.engines[name].report(), now)
        leases = []
        for n in range(4):  # at once
            prompt = alone(int(now * 20) * 4 + n)
            leases.append(fleet.take(prompt, now))
        at_broken = [lease for lease in leases if lease.endpoint.spec.name == "e0"]
        tripped = picker.endpoints["e0"].breaker.tripped
        if tripped and at_broken:
            probes.append(now)
            assert len(at_broken) <= ERRORS if len(probes) == 1 else len(at_broken) == 1
        for lease in leases:
            failed = lease.endpoint.spec.name == "e0" and now < broken_until
            picker.close(lease, now + 0.01, Outcome.ERROR if failed else Outcome.HEADERS)
    failed_probes = [at for at in probes if at < broken_until]
    assert 2 <= len(failed_probes) <= 6, "after 1, 2, 4 s"
    assert not picker.endpoints["e0"].breaker.tripped
    assert picker.endpoints["e0"].breaker.errors == 0
