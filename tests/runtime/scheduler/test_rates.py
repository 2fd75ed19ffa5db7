"""A tier that takes longer than computing is left alone, until it is fast again."""

from __future__ import annotations

from math import inf

import pytest
from treeline_runtime.kvcache.store import Moved
from treeline_runtime.scheduler.rates import TRY_AGAIN, LoadRates

PAGE_SIZE = 16


def rates(prefill_tokens_per_s: float = 1600.0) -> LoadRates:
    """A page is computed in 10 ms."""
    return LoadRates(lambda: prefill_tokens_per_s, PAGE_SIZE)


def measured(seconds_per_page: float) -> LoadRates:
    made = rates()
    for _ in range(2):
        made.on_load("DISK", Moved(10, 10 * seconds_per_page, "DISK"))
    return made


def test_a_page_of_a_peer_may_take_what_computing_takes_longer_than_the_host() -> None:
    made = rates()
    assert rates(0.0).page_s() == inf
    assert made.page_s() == pytest.approx(0.01)
    for _ in range(2):
        made.on_load("CPU", Moved(10, 0.02, "CPU"))
    assert made.page_s() == pytest.approx(0.008)


def test_a_tier_is_used_until_it_is_measured() -> None:
    assert rates().allows("DISK")
    assert rates(0.0).allows("DISK")


def test_the_first_load_does_not_count() -> None:
    made = rates()
    made.on_load("DISK", Moved(10, 100.0, "DISK"))
    assert made.allows("DISK")


def test_a_slow_tier_is_left_alone_and_the_other_is_not() -> None:
    made = measured(0.02)
    assert not made.allows("DISK")
    assert made.allows("CPU")
    assert measured(0.005).allows("DISK")


def test_now_and_then_one_load_tries_again_and_a_fast_one_ends_it() -> None:
    made = measured(0.02)
    for _ in range(3):
        assert [made.allows("DISK") for _ in range(TRY_AGAIN)] == [False] * (TRY_AGAIN - 1) + [True]
    made.on_load("DISK", Moved(10, 0.05, "DISK"))
    assert made.allows("DISK")


def test_a_single_slow_load_does_not_end_a_fast_tier() -> None:
    made = measured(0.001)
    made.on_load("DISK", Moved(10, 0.3, "DISK"))
    assert made.allows("DISK")


def test_small_loads_which_are_slow_do_not_end_a_tier_that_is_fast_for_large_ones() -> None:
    made = measured(0.001)
    for _ in range(3):
        made.on_load("DISK", Moved(1000, 1.0, "DISK"))
        for _ in range(10):
            made.on_load("DISK", Moved(1, 0.02, "DISK"))
        assert made.allows("DISK")


def test_a_page_of_the_disk_also_costs_what_a_page_of_the_host_does() -> None:
    made = measured(0.008)
    for _ in range(2):
        made.on_load("CPU", Moved(10, 0.03, "CPU"))
    assert made.tokens_per_s("DISK") == PAGE_SIZE / 0.011
    assert made.allows("CPU")
    assert not made.allows("DISK")


def test_a_load_that_brought_nothing_says_nothing() -> None:
    made = measured(0.001)
    made.on_load("DISK", Moved(0, 100.0, "DISK"))
    assert made.allows("DISK")
