"""InferenceModels as rules: each name has one owner, which depends on the rules alone."""

import random as random_module

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.model_rules import POOLS, rule, rule_sets
from treeline_wire.models import PoolClaim, decide_names, served_name


@settings(max_examples=60, deadline=None)
@given(rule_sets())
def test_a_name_behind_a_gateway_has_exactly_one_winner_and_it_is_the_oldest_valid_one(rules):
    verdicts = decide_names(rules, POOLS).verdicts
    assert set(verdicts) == {rule.name for rule in rules}
    claims = {}
    for one in rules:
        if verdicts[one.name].reason in ("Accepted", "ModelNameInUse"):
            claims.setdefault((POOLS[one.pool].gateway, one.model_name), []).append(one)
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
def test_when_a_winner_is_deleted_the_next_is_promoted_and_others_stay(rules):
    before = decide_names(rules, POOLS).verdicts
    for gone in rules:
        after = decide_names([one for one in rules if one is not gone], POOLS).verdicts
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
def test_impossible_weights_are_refused(targets, advice):
    verdict = decide_names([rule("r", targets=targets)], POOLS).verdicts["r"]
    assert verdict.reason == "WeightsInvalid"
    assert advice in verdict.message


def test_a_rule_without_its_pool_lists_the_existing_pools():
    verdict = decide_names([rule("r", pool="gone")], POOLS).verdicts["r"]
    assert verdict.reason == "PoolNotFound"
    assert "(there is `a`, `b`, `c`); create it, or correct spec.poolRef.name" in verdict.message
    many = {f"p{n}": PoolClaim("g") for n in range(8)}
    assert "and 3 more" in decide_names([rule("r", pool="gone")], many).verdicts["r"].message


def test_the_same_name_behind_two_gateways_is_no_conflict():
    verdicts = decide_names([rule("r"), rule("s", pool="c")], POOLS).verdicts
    assert verdicts["r"].accepted
    assert verdicts["s"].accepted


def test_an_invalid_rule_does_not_keep_a_name_from_a_younger_one():
    old = rule("old", targets=(("x", 0),))
    young = rule("young", created="2026-11-02T00:00:00Z")
    assert decide_names([old, young], POOLS).verdicts["young"].accepted
    mended = msgspec.structs.replace(old, targets=(("x", 1),))
    assert decide_names([mended, young], POOLS).verdicts["young"].winner == "old"


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
def test_a_pool_serves_its_given_name_or_the_last_part_of_its_uri(name, uri, served):
    assert served_name(name, uri) == served


NAMES = ("x", "y", "z")


def claim(created, *names, gateway="g"):
    return PoolClaim(gateway, names[:1], names[1:], f"2026-11-01T00:00:0{created}Z")


def at(second, name, model_name, pool, *targets):
    made = f"2026-11-01T00:00:0{second}Z"
    return rule(name, model_name, pool, created=made, targets=tuple((target, None) for target in targets))


def test_an_inference_model_does_not_take_the_name_of_an_older_pool():
    pools = {"theirs": claim(1, "llama"), "taker": claim(3, "other")}
    names = decide_names([at(2, "evil", "llama", "taker")], pools)
    assert names.holders["g", "llama"] == ("InferencePool", "theirs", "theirs")
    verdict = names.verdicts["evil"]
    assert (verdict.reason, verdict.winner) == ("ModelNameInUse", "theirs")
    assert "InferencePool `theirs` is older" in verdict.message


def test_targets_of_a_rule_for_a_pools_own_name_do_not_lead_its_requests_away():
    pools = {"theirs": claim(1, "llama", "lora"), "taker": claim(3, "other", "more")}
    for target, reason in (("other", "ModelNameInUse"), ("more", "ModelNameInUse"), ("lora", "Accepted")):
        verdict = decide_names([at(2, "rule", "llama", "theirs", "llama", target)], pools).verdicts["rule"]
        assert verdict.reason == reason
    # A name that no pool has is the rule's to lead wherever it likes.
    assert decide_names([at(2, "rule", "chat", "theirs", "llama", "other")], pools).verdicts["rule"].accepted


def test_a_pool_does_not_take_the_name_of_an_older_rule_or_of_an_older_pools_adapter():
    rules = [at(1, "alias", "llama", "a")]
    pools = {"a": claim(2, "base", "lora"), "b": claim(3, "llama"), "c": claim(3, "lora")}
    holders = decide_names(rules, pools).holders
    assert holders["g", "llama"] == ("InferenceModel", "alias", "a")
    assert holders["g", "lora"] == ("InferencePool", "a", "a")


def test_a_pool_wins_over_a_rule_of_the_same_second():
    pools = {"theirs": claim(1, "llama"), "taker": claim(1, "other")}
    assert not decide_names([at(1, "a-rule", "llama", "taker")], pools).verdicts["a-rule"].accepted


_pools = st.dictionaries(
    st.sampled_from("abc"),
    st.builds(
        lambda created, names, gateway: claim(created, *names, gateway=gateway),
        st.integers(0, 4),
        st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True),
        st.sampled_from("gh"),
    ),
    min_size=1,
)
_rules = st.lists(
    st.builds(
        lambda second, name, pool, targets: (second, name, pool, *targets),
        st.integers(0, 4),
        st.sampled_from(NAMES),
        st.sampled_from("abc"),
        st.lists(st.sampled_from(NAMES), max_size=2, unique=True),
    ),
    max_size=5,
)


@settings(max_examples=200, deadline=None)
@given(_pools, _rules, st.integers(0, 99))
def test_the_oldest_claim_owns_a_name_and_losers_learn_the_owner(pools, rows, seed):
    rules = [at(second, f"r{n}", *rest) for n, (second, *rest) in enumerate(rows)]
    names = decide_names(rules, pools)
    mixed, other = list(rules), list(pools.items())
    random_module.Random(seed).shuffle(mixed)
    random_module.Random(seed).shuffle(other)
    assert decide_names(mixed, dict(other)) == names
    valid = [one for one in rules if one.pool in pools]
    for (gateway, name), holder in names.holders.items():
        ages = [(p.created, 0, n) for n, p in pools.items() if p.gateway == gateway and name in p.names]
        ages += [(r.created, 1, r.name) for r in valid if r.model_name == name and pools[r.pool].gateway == gateway]
        oldest = min(ages)
        assert (holder.kind == "InferenceModel", holder.name) == (oldest[1] == 1, oldest[2])
    for one in valid:
        verdict, holder = names.verdicts[one.name], names.holders[pools[one.pool].gateway, one.model_name]
        if verdict.accepted:
            assert holder.pool == one.pool, "no request goes to another pool than the holder's"
            if holder.kind == "InferencePool":
                own = pools[one.pool].names
                others = {n for p in pools.values() if p.gateway == pools[one.pool].gateway for n in p.names}
                assert all(target in own or target not in others for target, _ in one.targets)
        else:
            assert verdict.winner
            assert f"`{verdict.winner}`" in verdict.message
