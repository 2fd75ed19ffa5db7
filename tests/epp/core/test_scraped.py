"""Successive scrapes of an engine's metrics update its load, and reservations cover the time between them."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st
from treeline_epp.endpoints import scraped
from treeline_epp.endpoints.load import OVERLOADED_FOR_S, SCRAPE_LAG_S, STALE_AFTER_S, EndpointLoad
from treeline_epp.endpoints.scraped import ASSUMED_PROMPT_TOKENS, MOST_RATE, Growth, ScrapedLoad, ScrapedTotals
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.picking.decision import Outcome
from treeline_epp.picking.picker import Picker, PickerConfig
from treeline_epp.picking.request import Request


def test_the_example_in_the_docstring() -> None:
    assert doctest.testmod(scraped).failed == 0


def test_a_scrape_counts_as_a_report_of_its_request_time() -> None:
    load = EndpointLoad()
    load.on_load(ScrapedLoad(running=3, waiting=2, kv_usage=0.25, tokens_total=1000), 10.0)
    assert load.report is not None
    assert (load.report.at, load.report.running, load.report.in_flight) == (10.0, 3, 5)
    assert (load.report.tokens_held, load.report.tokens_total) == (250, 1000)
    assert load.fresh(10.0 + STALE_AFTER_S)
    assert not load.fresh(10.1 + STALE_AFTER_S)
    assert not load.silent(100.0), "an engine that answers no scrape is not for that reason gone"


def test_waiting_requests_have_the_length_of_picked_answered_or_assumed_ones() -> None:
    load = EndpointLoad()
    load.on_load(ScrapedLoad(waiting=2), 0.0)
    assert load.queue(0.1) == (2 * ASSUMED_PROMPT_TOKENS, 2)
    load.on_load(ScrapedLoad(waiting=2, prompts=(10.0, 1000.0)), 1.0)
    load.on_load(ScrapedLoad(waiting=2, prompts=(14.0, 1800.0)), 2.0)
    assert load.queue(2.1) == (2 * 200, 2)
    load.reservations.open(50, now=2.0, predicted_prefill_s=0.1)
    load.on_load(ScrapedLoad(waiting=2, prompts=(14.0, 1800.0)), 3.0)
    assert load.queue(3.1) == (2 * 50, 2)


def test_a_scrape_misses_requests_that_arrived_during_a_step() -> None:
    load = EndpointLoad()
    load.reservations.open(40, now=1.0 - SCRAPE_LAG_S - 0.01, predicted_prefill_s=9)
    load.reservations.open(50, now=1.0 - SCRAPE_LAG_S + 0.01, predicted_prefill_s=9)
    load.reservations.open(60, now=1.1, predicted_prefill_s=9)
    load.on_load(ScrapedLoad(), 1.0)
    assert load.queue(1.2) == (110, 2)


def test_early_headers_keep_the_reservation_for_the_predicted_prefill() -> None:
    load = EndpointLoad()
    load.on_load(ScrapedLoad(), 0.0)
    first, second, third = (load.reservations.open(100, now=1.0, predicted_prefill_s=s) for s in (0.5, 9.0, 0.01))
    for reservation in (first, second, third):
        load.on_answered(reservation, 1.1, began=False)
    assert load.queue(1.1) == (200, 2), "the third should be done by now"
    assert load.reservations.expire(1.6) == 1
    assert load.queue(1.6) == (100, 1)
    load.on_load(ScrapedLoad(), 2.0)
    assert load.queue(2.1) == (0, 0), "the next report knows better"
    load.reservations.check()
    fourth = load.reservations.open(100, now=2.0, predicted_prefill_s=9.0)
    load.on_answered(fourth, 2.1, began=True)
    assert load.queue(2.1) == (0, 0)
    fifth = load.reservations.open(100, now=9.0, predicted_prefill_s=9.0)
    load.on_answered(fifth, 9.1, began=False)
    assert load.queue(9.1) == (0, 0), "nothing was read of late: as for an engine that tells nothing"


def test_only_a_later_scrape_ends_a_refusal_for_want_of_room() -> None:
    load = EndpointLoad()
    load.on_overloaded(5.0)
    load.on_load(ScrapedLoad(), 4.9)
    assert load.overloaded_until == 5.0 + OVERLOADED_FOR_S
    load.on_load(ScrapedLoad(), 5.1)
    assert load.overloaded_until < 0


def test_while_requests_wait_the_rate_is_computed_tokens_over_time() -> None:
    totals = ScrapedTotals()
    idle = ScrapedLoad(computed_tokens=0.0)
    assert totals.on_scrape(idle, 0.0) is None
    assert totals.on_scrape(ScrapedLoad(waiting=1, computed_tokens=9000.0), 60.0) is None, "it may have been idle"
    assert totals.on_scrape(ScrapedLoad(waiting=1, computed_tokens=9010.0), 60.5) is None, "too few tokens to tell"
    assert totals.on_scrape(ScrapedLoad(waiting=1, computed_tokens=12_000.0), 61.9) is None, "too short a time"
    assert totals.on_scrape(ScrapedLoad(waiting=1, computed_tokens=17_000.0), 62.0) == 4000.0, "small steps add up"
    assert totals.on_scrape(ScrapedLoad(waiting=0, computed_tokens=18_000.0), 62.5) is None
    assert totals.on_scrape(ScrapedLoad(waiting=4, computed_tokens=99_000.0), 63.0) is None
    assert totals.on_scrape(ScrapedLoad(waiting=4, computed_tokens=103_000.0), 65.0) == 2000.0


def test_without_waiting_requests_the_rate_comes_from_large_answered_prefills() -> None:
    totals = ScrapedTotals()
    assert totals.on_scrape(ScrapedLoad(prompts=(0.0, 0.0), prefills=(0.0, 0.0)), 0.0) is None
    assert totals.on_scrape(ScrapedLoad(prompts=(2.0, 1000.0), prefills=(1000.0, 0.25)), 1.0) == 4000.0
    assert totals.on_scrape(ScrapedLoad(prompts=(102.0, 2000.0), prefills=(2000.0, 9.25)), 2.0) is None, "trifles"
    assert totals.prompt_tokens == 10.0


def test_step_times_are_those_since_the_last_scrape_or_the_last_known_ones() -> None:
    load = EndpointLoad()
    for at, steps in enumerate([(100.0, 50.0), (200.0, 60.0), (200.0, 60.0), (201.0, 60.0), (300.0, 80.0), (1.0, 1.0)]):
        load.on_load(ScrapedLoad(running=1, steps=steps), float(at))
    assert load.report is not None
    assert load.report.decode_step_s == 0.2
    assert load.fastest_step_s == 0.1


def test_decreasing_totals_mean_another_process() -> None:
    load = EndpointLoad()
    for at, tokens in enumerate([1000.0, 5000.0, 10.0, 4010.0]):
        load.on_load(ScrapedLoad(waiting=1, computed_tokens=tokens), 2.0 * at)
    assert load.own_rate() == pytest.approx(2000.0)


@given(
    st.lists(
        st.builds(
            ScrapedLoad,
            running=st.integers(0, 10**9),
            waiting=st.integers(0, 10**9),
            kv_usage=st.floats(0.0, 1.0),
            tokens_total=st.integers(0, 10**15),
            computed_tokens=st.none() | st.floats(0.0, 1e15),
            prompts=st.none() | st.tuples(st.floats(0.0, 1e15), st.floats(0.0, 1e15)),
            prefills=st.none() | st.tuples(st.floats(0.0, 1e15), st.floats(0.0, 1e15)),
            steps=st.none() | st.tuples(st.floats(0.0, 1e15), st.floats(0.0, 1e15)),
        ),
        max_size=8,
    )
)
def test_rates_and_queues_stay_bounded_for_any_report(told: list[ScrapedLoad]) -> None:
    load = EndpointLoad()
    for at, one in enumerate(told):
        load.on_load(one, at / 2)
        tokens, requests = load.queue(at / 2)
        assert 0 <= tokens <= 1e12
        assert requests == one.waiting
        assert 0.0 <= load.own_rate() <= MOST_RATE
        assert load.report is not None
        assert 0 <= load.report.tokens_held <= load.report.tokens_total
        assert 0.0 <= load.report.decode_step_s < float("inf")


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30), st.integers(1, 20))
def test_growth_counts_everything_exactly_once(steps: list[tuple[int, int]], least: int) -> None:
    growth, first, second = Growth(), 0, 0
    growth.step((0, 0), least)
    seen = [0, 0]
    for more, seconds in steps:
        first, second = first + more, second + seconds
        if (grown := growth.step((first, second), least)) is not None:
            assert grown[0] >= least
            assert grown[1] > 0
            seen = [seen[0] + int(grown[0]), seen[1] + int(grown[1])]
        assert growth.base == tuple(seen)


def test_a_burst_between_two_scrapes_spreads_over_engines() -> None:
    picker = Picker(PickerConfig())
    for name, waiting in (("e0", 2), ("e1", 0)):
        picker.add_endpoint(EndpointSpec(name, f"10.0.0.{name[1]}:80"))
        picker.on_load(name, ScrapedLoad(waiting=waiting), 0.0)
    chosen = []
    for number in range(12):
        now = 0.3 + number / 100
        decision = picker.pick(Request(f"r{number}", prompt_tokens_estimate=1000), now)
        chosen.append(decision.endpoint.name)
        picker.close(picker.reserve(decision, now), now + 0.005, Outcome.HEADERS)
    assert chosen[0] == "e1"
    assert 5 <= chosen.count("e0") <= 6, chosen
