"""InferenceModels as rules: who has a name, where a request goes, and that both depend on nothing else."""

import random as random_module
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treeline_wire.models import ModelNotFound, ModelRule, ModelTable, ModelTarget, accept_models

POOLS = {"a": "east", "b": "east", "c": "west"}


def rule(name, model_name="chat", pool="a", created="2026-11-01T00:00:00Z", **more):
    return ModelRule(name, model_name, pool, created=created, uid=f"uid-{name}", **more)


weights = st.one_of(
    st.just(()),
    st.lists(st.integers(1, 40), min_size=1, max_size=6).map(
        lambda found: tuple((f"t{n}", weight) for n, weight in enumerate(found))
    ),
    st.integers(1, 6).map(lambda count: tuple((f"t{n}", None) for n in range(count))),
    st.just((("t0", 1), ("t1", None))),
    st.just((("t0", 0),)),
)


@st.composite
def rule_sets(draw):
    count = draw(st.integers(0, 8))
    return [
        ModelRule(
            f"rule-{n}",
            draw(st.sampled_from(["chat", "code", "own-a"])),
            draw(st.sampled_from(["a", "b", "c", "gone"])),
            draw(st.sampled_from(["Critical", "Standard", "Sheddable"])),
            draw(weights),
            tuple(draw(st.lists(st.sampled_from(["a", "b", "c", "gone"]), max_size=2))),
            f"2026-11-01T00:00:0{draw(st.integers(0, 3))}Z",
            f"uid-{n}",
        )
        for n in range(count)
    ]


@settings(max_examples=60, deadline=None)
@given(rule_sets(), st.integers(0, 99), st.floats(0, 1, exclude_max=True))
def test_the_order_of_the_rules_does_not_matter(rules, seed, point):
    mixed = list(rules)
    random_module.Random(seed).shuffle(mixed)
    assert accept_models(rules, POOLS) == accept_models(mixed, POOLS)
    served = {"a": ["own-a"], "b": ["own-b", "lora"]}
    one, other = ModelTable(served, rules, POOLS), ModelTable(served, mixed, POOLS)
    assert one.names() == other.names()
    for name in one.names():
        assert one.resolve(name, point) == other.resolve(name, point) == one.resolve(name, point)


@settings(max_examples=60, deadline=None)
@given(rule_sets())
def test_a_name_behind_a_gateway_has_exactly_one_winner_and_it_is_the_oldest_valid_one(rules):
    verdicts = accept_models(rules, POOLS)
    assert set(verdicts) == {rule.name for rule in rules}
    claims = {}
    for one in rules:
        if verdicts[one.name].reason in ("Accepted", "ModelNameInUse"):
            claims.setdefault((POOLS[one.pool], one.model_name), []).append(one)
    for claimants in claims.values():
        oldest, *later = sorted(claimants, key=lambda one: (one.created, one.name))
        assert verdicts[oldest.name].accepted
        assert verdicts[oldest.name].winner is None
        for one in later:
            assert (verdicts[one.name].reason, verdicts[one.name].winner) == ("ModelNameInUse", oldest.name)
            assert f"`{oldest.name}`" in verdicts[one.name].message
    for one in rules:
        assert verdicts[one.name].accepted == (verdicts[one.name].reason == "Accepted")


@settings(max_examples=60, deadline=None)
@given(rule_sets())
def test_when_a_winner_goes_the_next_is_promoted_and_nobody_else_moves(rules):
    before = accept_models(rules, POOLS)
    for gone in rules:
        after = accept_models([one for one in rules if one is not gone], POOLS)
        queue = sorted(
            (one for one in rules if before[one.name].winner == gone.name), key=lambda one: one.age
        )
        promoted = {queue[0].name} if before[gone.name].accepted and queue else set()
        changed = {name for name in after if after[name].accepted != before[name].accepted}
        assert changed == promoted


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_weights_are_respected_in_proportion(found):
    targets = tuple((f"t{n}", weight) for n, weight in enumerate(found))
    table = ModelTable({}, [rule("r", targets=targets)], POOLS)
    total = sum(found)
    points = [(step + 0.5) / total for step in range(total)]
    assert Counter(table.resolve("chat", point).target for point in points) == dict(targets)
    assert table.resolve("chat", 0.0).target == "t0"
    assert table.resolve("chat", 1 - 2**-53).target == targets[-1][0]


def test_targets_without_weights_get_equal_shares():
    table = ModelTable({}, [rule("r", targets=(("x", None), ("y", None)))], POOLS)
    source = random_module.Random(7)
    counts = Counter(table.resolve("chat", source.random()).target for _ in range(2000))
    assert abs(counts["x"] - 1000) < 100


def test_a_rule_says_pool_target_criticality_and_the_fallbacks_that_can_be_reached():
    one = rule(
        "r", "chat", "a", criticality="Sheddable", targets=(("big", 1),), fallback_pools=("c", "b", "gone")
    )
    table = ModelTable({"a": ["own"], "b": ["other"]}, [one], POOLS)
    assert table.resolve("chat", 0.3) == ModelTarget("a", "big", "Sheddable", ("b",))
    assert table.name_at("b", "big") == "other"
    message = table.verdicts["r"].message
    assert "`c` is not used: it is behind gateway `west`, not `east`" in message
    assert "`gone` is not used: there is no such InferencePool" in message


def test_a_target_of_another_pool_behind_the_same_gateway_goes_there():
    rule = ModelRule("m", "chat", "red", targets=(("red", 9), ("blue", 1), ("far", 1), ("nobodys", 1)))
    served = {"red": ["red"], "blue": ["blue", "red"], "other": ["far"]}
    table = ModelTable(served, [rule], {"red": "g", "blue": "g", "other": "h"})
    homes = {(t.pool, t.target) for t in (table.resolve("chat", n / 12) for n in range(12))}
    # its own pool goes before others, and what is behind another gateway or served by nobody is asked for at home
    assert homes == {("red", "red"), ("blue", "blue"), ("red", "far"), ("red", "nobodys")}


def test_without_targets_a_rule_is_an_alias_for_the_pools_only_model():
    rules = [rule("r")]
    assert ModelTable({"a": ["own"]}, rules, POOLS).resolve("chat").target == "own"
    assert ModelTable({"a": ["own", "chat"]}, rules, POOLS).resolve("chat").target == "chat"
    assert ModelTable({"a": ["own", "lora"]}, rules, POOLS).resolve("chat").target == "chat"
    assert ModelTable({}, rules, POOLS).resolve("chat") == ModelTarget("a", "chat"), "a pool scaled to zero"


def test_a_rule_goes_before_an_engines_own_name():
    served = {"a": ["own"], "b": ["chat"]}
    assert ModelTable(served).resolve("chat") == ModelTarget("b", "chat")
    table = ModelTable(served, [rule("r")], POOLS)
    assert table.resolve("chat").pool == "a"
    assert table.resolve("own") == ModelTarget("a", "own")
    assert table.names() == ["own", "chat"]


@pytest.mark.parametrize(
    ("served", "rules", "expected"),
    [
        ({"a": ["own"]}, [], ModelTarget("a", "own")),
        ({"a": ["own"]}, [rule("r", "alias")], ModelTarget("a", "own")),
        ({"a": ["own"]}, [rule("r", "own", criticality="Critical")], ModelTarget("a", "own", "Critical")),
        ({}, [rule("r", "chat")], ModelTarget("a", "chat")),
        ({"a": ["own"]}, [rule("r", "chat", "b")], None),
        ({"a": ["own", "lora"]}, [], None),
        ({}, [rule("r", "chat"), rule("s", "code")], None),
        ({}, [], None),
    ],
)
def test_a_request_without_a_model_is_served_where_there_is_nothing_to_choose(served, rules, expected):
    table = ModelTable(served, rules, POOLS)
    if expected is None:
        with pytest.raises(ModelNotFound) as caught:
            table.resolve(None)
        assert caught.value.name is None
    else:
        assert table.resolve(None) == expected


@pytest.mark.parametrize(
    ("targets", "advice"),
    [
        ((("x", 1), ("y", None)), "`y` of spec.targetModels have no weight; give every target one, or none"),
        ((("x", 0),), "`x` has 0"),
        ((("x", 1_000_001),), "from 1 to 1,000,000"),
        ((("x", -3), ("y", 2)), "`x` has -3"),
    ],
)
def test_weights_that_cannot_be_meant(targets, advice):
    verdict = accept_models([rule("r", targets=targets)], POOLS)["r"]
    assert verdict.reason == "WeightsInvalid"
    assert advice in verdict.message
    with pytest.raises(ModelNotFound):
        ModelTable({}, [rule("r", targets=targets)], POOLS).resolve("chat")


def test_a_rule_without_its_pool_says_which_pools_there_are():
    verdict = accept_models([rule("r", pool="gone")], POOLS)["r"]
    assert verdict.reason == "PoolNotFound"
    assert "(there is `a`, `b`, `c`); create it, or correct spec.poolRef.name" in verdict.message
    assert (
        "and 3 more" in accept_models([rule("r", pool="gone")], {f"p{n}": "g" for n in range(8)})["r"].message
    )


def test_the_same_name_behind_two_gateways_is_no_conflict():
    verdicts = accept_models([rule("r"), rule("s", pool="c")], POOLS)
    assert verdicts["r"].accepted
    assert verdicts["s"].accepted


def test_an_invalid_rule_does_not_keep_a_name_from_a_younger_one():
    old = rule("old", targets=(("x", 0),))
    young = rule("young", created="2026-11-02T00:00:00Z")
    assert accept_models([old, young], POOLS)["young"].accepted
    mended = msgspec.structs.replace(old, targets=(("x", 1),))
    assert accept_models([mended, young], POOLS)["young"].winner == "old"
