"""The load model: queues from reports and reservations, prefill rates from three sources."""

import pytest
from treeline_epp.endpoints.load import (
    DEFAULT_PREFILL_RATE,
    OVERLOADED_FOR_S,
    STALE_AFTER_S,
    EndpointLoad,
    prefill_rate,
    trust,
)
from treeline_wire.load import LoadStat, TreelineLoad


def ours(queued: int = 0, rate: float = 0.0, waiting: int = 0) -> TreelineLoad:
    return TreelineLoad(waiting_uncached_tokens=queued, prefill_tokens_per_s=rate, waiting=waiting)


def test_the_queue_is_the_report_and_later_picks() -> None:
    load = EndpointLoad()
    load.reservations.open(100, now=0.5, predicted_prefill_s=1)
    load.on_load(ours(queued=700, waiting=2), now=1.0)
    load.reservations.open(40, now=1.5, predicted_prefill_s=1)
    assert load.queue(now=1.6) == (740, 3)


def test_a_report_that_may_predate_a_pick_does_not_hide_it() -> None:
    load = EndpointLoad()
    load.reservations.open(40, now=0.999, predicted_prefill_s=1)
    load.on_load(ours(), now=1.0)
    assert load.queue(now=1.0) == (40, 1)


def test_a_pick_that_the_report_knows_already_counts_once() -> None:
    load = EndpointLoad()
    load.reservations.open(8000, now=0.97, predicted_prefill_s=1)
    load.reservations.open(100, now=0.99, predicted_prefill_s=1)
    load.on_load(ours(queued=8000, waiting=1), now=1.0)
    assert load.queue(now=1.0) == (8100, 3), "what is reserved is all that can wait"
    load.on_load(ours(queued=8150, waiting=1), now=1.001)
    assert load.queue(now=1.001)[0] == 8200, "an estimate that was a little short changes little"
    load.on_load(ours(queued=30_000, waiting=2), now=1.002)
    assert load.queue(now=1.002)[0] == 38_100, "work that nobody reserved: nothing says which picks are in it"
    load.on_load(ours(queued=100, waiting=3), now=1.003)
    assert load.queue(now=1.003)[0] == 8200, "more wait than were picked here"


def test_without_a_fresh_report_the_queue_is_all_reservations() -> None:
    load = EndpointLoad()
    load.reservations.open(40, now=0.0, predicted_prefill_s=10)
    assert load.queue(now=0.0) == (40, 1)
    load.on_load(ours(queued=900), now=1.0)
    assert load.fresh(1.0 + STALE_AFTER_S)
    assert load.queue(now=1.0 + STALE_AFTER_S) == (900, 0)
    assert load.queue(now=1.1 + STALE_AFTER_S) == (40, 1)


def test_in_flight_is_the_report_and_later_picks() -> None:
    load = EndpointLoad()
    assert load.in_flight(now=0.0) is None, "nothing was reported yet"
    early = load.reservations.open(40, now=0.5, predicted_prefill_s=1)
    load.on_load(TreelineLoad(running=2, waiting=1, in_flight=4), now=1.0)
    assert load.in_flight(now=1.0) == 4, "the server has one more than the scheduler"
    load.reservations.open(40, now=1.5, predicted_prefill_s=1)
    assert load.in_flight(now=1.6) == 5
    load.on_load(TreelineLoad(), now=2.0)
    assert load.in_flight(now=2.0) == 2, "both were picked, and neither has been answered"
    load.reservations.close(early)
    assert load.in_flight(now=2.0 + STALE_AFTER_S) == 1
    assert load.in_flight(now=2.1 + STALE_AFTER_S) is None, "it has fallen silent"
    load.on_load(LoadStat(num_running=3, num_waiting=4), now=10.0)
    assert load.in_flight(now=10.0) == 7


def test_our_report_names_the_rate() -> None:
    load = EndpointLoad()
    load.train(1000, 0, 1.0, now=0.0)
    assert load.own_rate() == 1000
    load.on_load(ours(rate=5000.0), now=1.0)
    assert load.own_rate() == 5000
    load.on_load(ours(rate=0.0), now=2.0)  # idle: nothing measured, the old value stays
    assert load.own_rate() == 5000


def test_sglangs_totals_give_the_rate_by_their_deltas() -> None:
    load = EndpointLoad()
    load.on_load(LoadStat(total_prefill_uncached_tokens=10_000, total_prefill_busy_us=5_000_000), 1.0)
    assert load.own_rate() == 0
    load.on_load(LoadStat(total_prefill_uncached_tokens=10_050, total_prefill_busy_us=5_010_000), 2.0)
    assert load.own_rate() == 0, "too few tokens to tell"
    load.on_load(LoadStat(total_prefill_uncached_tokens=11_000, total_prefill_busy_us=5_200_000), 3.0)
    assert load.own_rate() == 5000, "small steps add up"


def test_a_restart_of_the_totals_is_not_a_rate() -> None:
    load = EndpointLoad()
    load.on_load(LoadStat(total_prefill_uncached_tokens=10_000, total_prefill_busy_us=5_000_000), 1.0)
    load.on_load(LoadStat(total_prefill_uncached_tokens=100, total_prefill_busy_us=50_000), 2.0)
    assert load.own_rate() == 0
    load.on_load(LoadStat(total_prefill_uncached_tokens=1100, total_prefill_busy_us=550_000), 3.0)
    assert load.own_rate() == 2000


def test_times_to_first_token_train_unless_the_work_was_too_little() -> None:
    load = EndpointLoad()
    load.train(50, 0, 1.0, now=0.0)
    assert load.own_rate() == 0
    load.train(500, 500, 0.5, now=1.0)
    assert load.own_rate() == 2000
    load.train(1000, 0, 0.25, now=2.0)
    assert 2000 < load.own_rate() < 4000


def test_an_unmeasured_rate_is_that_of_the_fastest_peer_or_a_default() -> None:
    assert prefill_rate(0.0, trust(0.0, 0.0, 9.0), 200.0) == 200
    assert prefill_rate(0.0, trust(0.0, 0.0, 9.0), 0.0) == DEFAULT_PREFILL_RATE


def test_a_rate_counts_by_the_number_and_age_of_its_measurements() -> None:
    load = EndpointLoad()
    planned = list[float]()
    for number in range(200):
        load.on_load(ours(rate=100.0 + number % 2), now=number / 10)
        planned.append(prefill_rate(100.0, trust(load.rate_samples, load.measured_at, number / 10), 1000.0))
    assert planned[0] > 750, "one slow measurement may be a stall"
    assert planned == sorted(planned, reverse=True)
    assert planned[-1] < 210, "under load it is believed"
    later = [prefill_rate(100.0, trust(load.rate_samples, load.measured_at, now), 1000.0) for now in (20, 30, 80, 620)]
    assert later == sorted(later)
    assert later[-1] > 850, "what is old says little"
    load.on_load(ours(rate=99.0), now=620.0)
    assert prefill_rate(99.0, trust(load.rate_samples, load.measured_at, 620.0), 1000.0) > 650, "nor with one beside it"
    load.on_load(ours(rate=99.0), now=700.0)
    assert load.measured_at == 620, "the same figure in a heartbeat is no measurement"


def test_hit_share_is_an_average_of_reported_hits() -> None:
    load = EndpointLoad()
    for _ in range(40):
        load.train_hits(75, 100)
    assert load.hit_share == pytest.approx(0.75, abs=0.01)
    load.train_hits(5, 0)
    assert load.hit_share == pytest.approx(0.75, abs=0.01)


def test_overloaded_lasts_until_the_next_report() -> None:
    load = EndpointLoad()
    load.on_overloaded(now=1.0)
    assert load.overloaded_until == 1.0 + OVERLOADED_FOR_S
    load.on_load(ours(), now=1.1)
    assert load.overloaded_until < 1.1
