"""`round_robin`, `random`, `least_load`, `power_of_two`, `cache_aware`, against their descriptions."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.candidates import candidates
from treeline_epp.picking.policies import create_policy
from treeline_epp.picking.request import Request

ASK = Request("id", model="m")


def test_round_robin_gives_each_endpoint_a_turn() -> None:
    policy = create_policy("round_robin", random.Random(3))
    names = list("cab")
    turns = [names[policy.rank(ASK, candidates(names), 1)[0]] for _ in range(9)]
    assert turns[:3] == turns[3:6] == turns[6:]
    assert sorted(turns[:3]) == list("abc")


def test_round_robin_continues_after_the_last_endpoint_when_endpoints_change() -> None:
    policy = create_policy("round_robin", random.Random(3))
    names = [f"e{n}" for n in range(10)]
    turns = [names[policy.rank(ASK, candidates(names), 1)[0]] for _ in range(10)]
    # One that had its turn goes, another comes: the others keep their order.
    changed = [*names[1:], "new"]
    later = [changed[policy.rank(ASK, candidates(changed), 1)[0]] for _ in range(10)]
    assert sorted(later) == sorted(changed)
    assert [name for name in later if name != "new"] == [name for name in turns if name != "e0"]


def test_models_take_turns_of_their_own() -> None:
    policy = create_policy("round_robin", random.Random(3))
    for _ in range(2):
        seen = Counter(policy.rank(Request("id", model=model), candidates("ab"), 1)[0] for model in "mnmn")
        assert seen == {0: 2, 1: 2}


def test_random_is_even() -> None:
    policy = create_policy("random", random.Random(5))
    seen = Counter(policy.rank(ASK, candidates("abcd"), 1)[0] for _ in range(800))
    assert min(seen.values()) > 150


@settings(max_examples=100, deadline=None)
@given(loads=st.lists(st.integers(0, 9), min_size=1, max_size=12), seed=st.integers(0, 9))
def test_least_load_is_the_lightest_first(loads: list[float], seed: int) -> None:
    names = [f"e{n}" for n in range(len(loads))]
    order = create_policy("least_load", random.Random(seed)).rank(ASK, candidates(names, load=loads), len(loads))
    assert [loads[at] for at in order] == sorted(loads)


def test_least_load_shares_among_equals() -> None:
    policy = create_policy("least_load", random.Random(5))
    group = candidates("abcd", load=[1, 1, 2, 1])
    seen = Counter(policy.rank(ASK, group, 1)[0] for _ in range(300))
    assert set(seen) == {0, 1, 3}
    assert min(seen.values()) > 60


def test_power_of_two_takes_the_lighter_of_two_and_never_the_heaviest() -> None:
    policy = create_policy("power_of_two", random.Random(5))
    loads = [3.0, 0.0, 9.0, 1.0]
    seen = Counter()
    for _ in range(600):
        first, second, *_ = policy.rank(ASK, candidates("abcd", load=loads), 3)
        assert loads[first] < loads[second]
        seen[first] += 1
    # Of the six pairs the lightest is in three, the next in two that it wins, and so on.
    assert seen[1] == pytest.approx(300, abs=60)
    assert seen[3] == pytest.approx(200, abs=60)
    assert 2 not in seen


@settings(max_examples=300, deadline=None)
@given(
    state=st.lists(
        st.tuples(st.integers(0, 12), st.sampled_from([0, 200, 299, 300, 301, 999])), min_size=1, max_size=6
    ),
    absolute=st.integers(0, 8),
    relative=st.sampled_from([1.0, 1.5, 2.0]),
    threshold=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_cache_aware_follows_its_description(
    state: list[tuple[int, int]], absolute: int, relative: float, threshold: float
) -> None:
    loads, cached = [load for load, _ in state], [held for _, held in state]
    text = f"balance_abs_threshold={absolute},balance_rel_threshold={relative},cache_threshold={threshold}"
    policy = create_policy(f"cache_aware:{text}", random.Random(1))
    names = [f"e{n}" for n in range(len(state))]
    first = policy.rank(ASK, candidates(names, load=loads, cached=cached), 1)[0]
    uneven = max(loads) - min(loads) > absolute and max(loads) > relative * min(loads)
    if uneven or max(cached) / 1000 <= threshold:
        assert loads[first] == min(loads)
    else:
        assert cached[first] == max(cached)
        assert loads[first] == min(load for load, held in state if held == max(cached))


def test_cache_aware_has_the_defaults_of_the_gateway() -> None:
    policy = create_policy("cache_aware", random.Random(1))

    def choice(load: list[float], cached: list[float]) -> int:
        return policy.rank(ASK, candidates("ab", load=load, cached=cached), 1)[0]

    assert choice([64, 0], [301, 0]) == 0  # 64 apart is not uneven, and 30 % are not enough
    assert choice([65, 0], [900, 0]) == 1
    assert choice([64, 0], [300, 0]) == 1
    assert choice([195, 130], [900, 0]) == 0  # one and a half times is not more than that
    assert choice([196, 130], [900, 0]) == 1
