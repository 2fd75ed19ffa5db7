"""InferenceModels as rules: who has a name, and that it depends on nothing else."""

import random as random_module

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.model_rules import POOLS, rule, rule_sets
from treeline_wire.models import accept_models, served_name


@settings(max_examples=60, deadline=None)
@given(rule_sets(), st.integers(0, 99))
def test_the_order_of_the_rules_does_not_matter(rules, seed):
    mixed = list(rules)
    random_module.Random(seed).shuffle(mixed)
    assert accept_models(rules, POOLS) == accept_models(mixed, POOLS)


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
        queue = sorted((one for one in rules if before[one.name].winner == gone.name), key=lambda one: one.age)
        promoted = {queue[0].name} if before[gone.name].accepted and queue else set()
        changed = {name for name in after if after[name].accepted != before[name].accepted}
        assert changed == promoted


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


def test_a_rule_without_its_pool_says_which_pools_there_are():
    verdict = accept_models([rule("r", pool="gone")], POOLS)["r"]
    assert verdict.reason == "PoolNotFound"
    assert "(there is `a`, `b`, `c`); create it, or correct spec.poolRef.name" in verdict.message
    assert "and 3 more" in accept_models([rule("r", pool="gone")], {f"p{n}": "g" for n in range(8)})["r"].message


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


@pytest.mark.parametrize(
    ("name", "uri", "served"),
    [
        ("mine", "hf://org/name", "mine"),
        (None, "builtin://tiny", "tiny"),
        (None, "hf://org/name", "name"),
        ("", "hf://org/name@revision/1", "name"),
        (None, "pvc://claim", "claim"),
        (None, "pvc://claim/a/b/", "b"),
        (None, "path:///models/x@1", "x@1"),
        (None, "", ""),
    ],
)
def test_a_pool_serves_the_name_given_or_the_last_part_of_its_uri(name, uri, served):
    assert served_name(name, uri) == served
