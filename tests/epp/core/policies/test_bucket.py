"""`bucket`: the ranges of sgl-model-gateway's own examples, and long prompts apart from short ones."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.candidates import candidates
from treeline_epp.picking.endpoint import identity_of
from treeline_epp.picking.policies import create_policy
from treeline_epp.picking.policies.bucket import MOST_REQUESTS, Buckets
from treeline_epp.picking.request import Request

SIZE = 3


def after(lengths: list[int], interval_s: float = 5.0) -> list[int]:
    """The longest length of each range but the last, when an interval with these requests is over."""
    buckets = Buckets(interval_s)
    buckets.advance(0.0, SIZE)
    for length in lengths:
        buckets.add(0.0, length, 0.0)
    buckets.advance(interval_s, SIZE)
    return buckets.edges


def test_ranges_of_the_gateways_examples() -> None:
    assert after([]) == [1364, 2729]
    assert after([33, 34, 34]) == [33, 67]
    assert after([5, 10, 15, 20, 24, 26]) == [20, 26]


def test_ranges_stay_until_the_load_has_doubled_or_halved() -> None:
    buckets = Buckets(5.0)
    buckets.advance(0.0, SIZE)
    for at, lengths in enumerate(([5, 10, 15, 20, 24, 26], [10, 60, 80], [200, 300, 400])):
        for length in lengths:
            buckets.add(0.0, length, 5.0 * at + 4.0)
        buckets.advance(5.0 * (at + 1), SIZE)
        assert buckets.edges == ([20, 26] if at < 2 else [300, 400])
        buckets.advance(5.0 * at + 9.9, SIZE)


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(0, 5000), max_size=40), size=st.integers(1, 9))
def test_ranges_are_in_order_and_cover_everything(lengths: list[int], size: int) -> None:
    buckets = Buckets(5.0)
    buckets.advance(0.0, size)
    for length in lengths:
        buckets.add(0.0, length, 0.0)
    assert buckets.sent.total() == sum(lengths)
    buckets.advance(5.0, size)
    edges = buckets.edges
    assert len(edges) == size - 1
    assert edges == sorted(edges)
    assert len(set(edges)) == len(edges)
    buckets.advance(10.1, size)
    assert not buckets.sent, "of endpoints that get nothing, nothing is kept"


def rank(policy: object, chars: int, names: list[str], now: float) -> str:
    group = candidates(names, now=now)
    return names[policy.rank(Request("id", key=b"a" * chars), group, 1)[0]]  # type: ignore[attr-defined]


def test_short_prompts_have_endpoints_of_their_own() -> None:
    policy = create_policy("bucket:balance_abs_threshold=1000000", random.Random(1))
    names = sorted((f"pod-{n}" for n in range(4)), key=identity_of)
    rng = random.Random(2)
    for at in range(400):
        rank(policy, rng.choice((100, rng.randrange(4000, 8000))), names, at * 0.1)
    assert rank(policy, 100, names, 40.0) == names[0]
    assert {rank(policy, chars, names, 40.0) for chars in range(6000, 8000, 100)} == set(names[1:])


def test_whoever_got_the_fewest_characters_is_next_when_they_are_uneven() -> None:
    policy = create_policy("bucket:balance_abs_threshold=32", random.Random(1))
    names = sorted("abc", key=identity_of)
    assert rank(policy, 33, names, 0.0) == names[0]
    assert {rank(policy, 33, names, 0.0), rank(policy, 33, names, 0.0)} == set(names[1:])
    policy = create_policy("bucket:balance_abs_threshold=33", random.Random(1))
    assert [rank(policy, 33, names, 0.0), rank(policy, 8, names, 0.0)] == [names[0], names[0]]
    assert rank(policy, 8, names, 0.0) != names[0]


def test_a_flood_is_remembered_in_part() -> None:
    buckets = Buckets(5.0)
    buckets.advance(0.0, SIZE)
    for _ in range(MOST_REQUESTS + 10):
        buckets.add(0.0, 1, 0.0)
    buckets.advance(0.1, SIZE)
    assert buckets.sent.total() == pytest.approx(MOST_REQUESTS)
