"""Reservations open once, close once, and never leak."""

import doctest
import random

from treeline_epp.endpoints import reservations
from treeline_epp.endpoints.reservations import EXPIRY_FACTOR, MIN_LIFETIME_S, Reservations


def test_the_example_in_the_docstring() -> None:
    assert doctest.testmod(reservations).failed == 0


def test_a_reservation_expires_after_three_times_its_predicted_prefill() -> None:
    held = Reservations()
    slow = held.open(10, now=0.0, predicted_prefill_s=4.0)
    held.open(5, now=0.0, predicted_prefill_s=0.001)
    assert held.expire(now=MIN_LIFETIME_S) == 1
    assert slow.open
    assert held.expire(now=EXPIRY_FACTOR * 4.0 - 0.1) == 0
    assert held.expire(now=EXPIRY_FACTOR * 4.0) == 1
    assert not held.close(slow)
    assert held.tokens == 0


def test_random_openings_and_closings_add_up() -> None:
    rng = random.Random(0)
    held = Reservations()
    opened = []
    now = 0.0
    for _ in range(500):
        now += rng.random()
        action = rng.random()
        if action < 0.5:
            opened.append(held.open(rng.randrange(1000), now, rng.random() * 3))
        elif action < 0.7 and opened:
            held.let_run(rng.choice(opened), now)
        elif opened:
            held.close(rng.choice(opened))
        if action < 0.1:
            held.expire(now)
            assert all(r.done_at > now for r in opened if r.open and r.answered)
        elif action < 0.15:
            held.close_answered(now - 1)
            assert all(r.opened_at > now - 1 for r in opened if r.open and r.answered)
        held.check()
        newer = [r for r in opened if r.open and r.opened_at > now - 2]
        assert held.newer_than(now - 2) == (sum(r.tokens for r in newer), len(newer))
    held.expire(now + 1000)
    assert (held.tokens, len(held)) == (0, 0)
