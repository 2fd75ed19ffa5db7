"""Properties of every policy, and how policies are named."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.candidates import candidates
from treeline_epp.picking.policies import POLICIES, Choice, PolicyError, PoolPolicies, choice_of, create_policy
from treeline_epp.picking.request import Request
from treeline_wire.namespaces import join_namespace

NAMES = [f"e{number}" for number in range(40)]


@st.composite
def rounds(draw: st.DrawFn) -> list[tuple[Request, dict[str, object]]]:
    """Draw requests, each with its endpoints."""
    made = []
    for at in range(draw(st.integers(1, 12))):
        names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=12, unique=True))
        numbers = st.lists(st.integers(0, 200), min_size=len(names), max_size=len(names))
        key = draw(st.none() | st.binary(max_size=80))
        request = Request(
            f"r{at}",
            model=draw(st.sampled_from(["m", "n", None])),
            namespace=join_namespace(draw(st.sampled_from([None, "lora"])), None),
            key=key,
            prompt_tokens_estimate=draw(st.integers(0, 5000)),
            pool=draw(st.sampled_from(["p", None])),
        )
        costs = [number / 1000 for number in draw(numbers)]
        given_to = {"load": draw(numbers), "cached": draw(numbers), "cost": costs}
        made.append((request, {"names": names, "now": at * 1.7, "adapters": {names[0]: {"lora"}}, **given_to}))
    return made


@pytest.mark.parametrize("name", sorted(POLICIES))
@settings(max_examples=10, deadline=None)
@given(asked=rounds(), count=st.integers(1, 5), seed=st.integers(0, 3))
def test_a_ranking_has_distinct_candidates_and_is_reproducible(
    name: str, asked: list[tuple[Request, dict[str, object]]], count: int, seed: int
) -> None:
    first, second = (create_policy(name, random.Random(seed)) for _ in range(2))
    for request, world in asked:
        group = candidates(**world)  # type: ignore[arg-type]
        order = first.rank(request, group, count)
        assert len(order) == len(set(order)) == min(count, len(group.cost_s))
        assert all(type(at) is int and 0 <= at < len(group.cost_s) for at in order)
        assert second.rank(request, group, count) == order


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_policy_does_not_modify_its_input(name: str) -> None:
    group = candidates(NAMES, load=list(range(40)), cached=list(range(40)), cost=list(range(40)))
    before = [array.copy() for array in (group.cost_s, group.cached_tokens, group.identity)]
    policy = create_policy(name, random.Random(1))
    for _ in range(3):
        policy.rank(Request("id", key=b"a" * 100), group, 2)
    assert all((a == b).all() for a, b in zip(before, (group.cost_s, group.cached_tokens, group.identity), strict=True))


def test_a_written_choice_is_read_back() -> None:
    text = "cache_aware:cache_threshold=0.5,balance_abs_threshold=8"
    assert str(Choice.parse(text)) == str(choice_of(text)) == text
    assert choice_of(" treeline ") == Choice("predicted_ttft")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("best", "unknown policy 'best'; valid: bucket, cache_aware, least_load"),
        ("", "unknown policy ''"),
        ("random:seed=1", "policy random has no parameter 'seed'; it has none"),
        ("cache_aware:threshold=1", "it has cache_threshold, balance_abs_threshold, balance_rel_threshold"),
        ("cache_aware:cache_threshold=1.5", "cache_threshold"),
        ("cache_aware:cache_threshold=nan", "cache_threshold"),
        ("cache_aware:cache_threshold=much", "cache_threshold"),
        ("cache_aware:balance_rel_threshold=0.5", "balance_rel_threshold"),
        ("cache_aware:balance_abs_threshold=inf", "must be a finite number"),
        ("cache_aware:cache_threshold", "'cache_threshold' is not of the form key=value"),
        ("cache_aware:", "'' is not of the form key=value"),
        ("prefix_hash:load_factor=2,load_factor=3", "'load_factor' is there twice"),
        ("prefix_hash:prefix_token_count=0", "prefix_token_count"),
        ("consistent_hashing:key=cookie", "it has prefix_token_count, load_factor"),
        ("bucket:bucket_adjust_interval_secs=0", "bucket_adjust_interval_secs"),
    ],
)
def test_a_wrong_choice_lists_the_valid_ones(text: str, words: str) -> None:
    with pytest.raises(PolicyError) as caught:
        choice_of(text)
    assert words in str(caught.value)


@settings(max_examples=100, deadline=None)
@given(
    st.text(max_size=40)
    | st.builds(
        "{}:{}={}".format,
        st.sampled_from([*POLICIES, "treeline", "x"]),
        st.sampled_from(["load_factor", "header", "name", "cache_threshold", "max_age", "é"]),
        st.one_of(st.text(max_size=12), st.floats().map(str), st.integers().map(str), st.just("x-user")),
    )
)
def test_any_text_is_a_choice_that_round_trips_or_an_error(text: str) -> None:
    try:
        choice = choice_of(text)
    except PolicyError:
        return
    assert choice_of(str(choice)) == choice
    create_policy(text, random.Random(1)).rank(Request("id", key=b"a"), candidates("ab"), 1)


def test_pools_choose_for_themselves_and_keep_their_state() -> None:
    policies = PoolPolicies("random", 1)
    policies.set({"a": "round_robin", "b": "treeline"})
    assert [policies.name_of(pool) for pool in ("a", "b", "c", None)] == [
        "round_robin",
        "predicted_ttft",
        "random",
        "random",
    ]
    kept = policies.of("a")
    policies.set({"a": "round_robin", "b": "none such"})
    assert policies.of("a") is kept
    assert policies.of("b").name == "random"
    policies.set({"a": "least_load"})
    assert policies.of("a").name == "least_load"
