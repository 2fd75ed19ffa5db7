"""Guesses are made while they bring tokens faster, by what steps of more tokens were measured to take."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from treeline_runtime.scheduler.drafting import paying
from treeline_runtime.scheduler.step_times import FEW, STEPS, StepTimes


def measured(base: float, each: float, *steps: int) -> StepTimes:
    """Return what is known after steps of so many tokens, of base + each × tokens seconds."""
    times = StepTimes()
    for tokens in steps:
        times.take(tokens, base + each * tokens)
    return times


@given(st.integers(0, 7), st.floats(0, 1), st.floats(0.001, 1))
def test_the_depth_that_pays_gives_most_tokens_a_second(most: int, share: float, cost: float) -> None:
    def rate(depth: int) -> float:
        return sum(share**place for place in range(depth + 1)) / (1 + cost * depth)

    assert rate(paying(most, share, cost)) == pytest.approx(max(map(rate, range(most + 1))))


def test_free_tokens_are_guessed_as_far_as_allowed_and_dear_ones_never() -> None:
    assert paying(7, 0.5, 0.0) == 7
    assert paying(7, 0.8, 0.3) == 3
    assert paying(7, 0.8, 0.8) == 0
    assert paying(7, 1.0, 1.0) == 0
    assert paying(0, 1.0, 0.0) == 0


@given(st.floats(0, 1), st.floats(1e-6, 0.1), st.lists(st.integers(1, 256), min_size=2, max_size=99))
def test_the_cost_is_that_of_the_line_or_less(base: float, each: float, steps: list[int]) -> None:
    cost = measured(base, each, *steps).cost(64)
    assert 0 <= cost <= each * 64 / (base + each * 64) * 1.01


@pytest.mark.parametrize(("base", "each"), [(0.01, 0.0), (0.01, 0.00001), (0.001, 0.0005)])
def test_steps_with_and_without_guesses_tell_the_cost(base: float, each: float) -> None:
    times = measured(base, each, *(random.Random(1).choices([64, 256], k=9)))
    assert times.cost(64) == pytest.approx(each * 64 / (base + each * 64), rel=0.05)
    assert times.cost(FEW - 1) == 0.0


def test_nothing_is_known_of_equal_steps_and_what_was_known_fades() -> None:
    assert measured(0.01, 0.001, *[64] * 99).cost(64) == 0.0
    times = measured(0.01, 0.001, *[64, 256] * 20)
    known = times.cost(64)
    for _ in range(10 * STEPS):
        times.take(64, 0.01 + 0.001 * 64)
    assert times.cost(64) < 0.5 * known
    times.take(128, 0.01 + 0.001 * 128)
    assert times.cost(64) > 0.7 * known, "one step with guesses tells it again"


def test_a_pause_of_the_machine_counts_little() -> None:
    times = measured(0.01, 0.0001, *[64, 256] * 40)
    known = times.cost(64)
    times.take(256, 5.0)
    assert times.cost(64) < 2 * known
