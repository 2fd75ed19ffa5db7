"""Requests are routed by model, from the models that engines serve and from InferenceModels alone."""

import random as random_module
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.model_rules import POOLS, rule, rule_sets
from treeline_epp.requests.model_registry import ModelNotFound, ModelTable, ModelTarget
from treeline_wire.models import ModelRule, PoolClaim


@settings(max_examples=60, deadline=None)
@given(rule_sets(), st.integers(0, 99), st.floats(0, 1, exclude_max=True))
def test_the_order_of_the_rules_does_not_matter(rules, seed, point):
    mixed = list(rules)
    random_module.Random(seed).shuffle(mixed)
    served = {"a": ["own-a"], "b": ["own-b", "lora"]}
    one, other = ModelTable(served, rules, POOLS), ModelTable(served, mixed, POOLS)
    assert one.names() == other.names()
    for name in one.names():
        assert one.resolve(name, point) == other.resolve(name, point) == one.resolve(name, point)


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


def test_a_rule_gives_pool_target_criticality_and_reachable_fallbacks():
    one = rule("r", "chat", "a", criticality="Sheddable", targets=(("big", 1),), fallback_pools=("c", "b", "gone"))
    table = ModelTable({"a": ["own"], "b": ["other"]}, [one], POOLS)
    assert table.resolve("chat", 0.3) == ModelTarget("a", "big", "Sheddable", ("b",))
    assert table.name_at("b", "big") == "other"
    message = table.verdicts["r"].message
    assert "`c` is not used: it is behind gateway `west`, not `east`" in message
    assert "`gone` is not used: there is no such InferencePool" in message


def test_a_target_of_another_pool_behind_the_same_gateway_goes_there():
    rule = ModelRule("m", "chat", "red", targets=(("red", 9), ("blue", 1), ("far", 1), ("nobodys", 1)))
    served = {"red": ["red"], "blue": ["blue", "red"], "other": ["far"]}
    table = ModelTable(served, [rule], {"red": PoolClaim("g"), "blue": PoolClaim("g"), "other": PoolClaim("h")})
    homes = {(t.pool, t.target) for t in (table.resolve("chat", n / 12) for n in range(12))}
    # its own pool wins; a model of another gateway, or of no pool, is requested from its own pool
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
def test_a_request_without_a_model_is_served_if_there_is_only_one(served, rules, expected):
    table = ModelTable(served, rules, POOLS)
    if expected is None:
        with pytest.raises(ModelNotFound) as caught:
            table.resolve(None)
        assert caught.value.name is None
    else:
        assert table.resolve(None) == expected


def test_a_rule_with_impossible_weights_serves_nothing():
    rules = [rule("r", targets=(("x", 1), ("y", None)))]
    with pytest.raises(ModelNotFound):
        ModelTable({}, rules, POOLS).resolve("chat")


def test_the_model_picks_the_pool() -> None:
    pools = {"small": ["a", "b"], "large": ["c", "b"]}
    table = ModelTable(pools)
    assert table.resolve("c") == ModelTarget("large", "c")
    assert table.resolve("b") == ModelTarget("small", "b"), "the first pool that serves it"
    assert table.names() == ["a", "b", "c"]


@pytest.mark.parametrize("pools", [{}, {"p": []}, {"p": ["a", "b"]}, {"p": ["a"], "q": ["a"]}])
def test_an_unknown_model_is_not_found(pools: dict[str, list[str]]) -> None:
    for name in ("x", None):
        with pytest.raises(ModelNotFound) as caught:
            ModelTable(pools).resolve(name)
        assert caught.value.name == name


def test_no_claim_newer_than_a_pool_gets_the_requests_for_its_name() -> None:
    """The claims are: an InferenceModel for another pool, targets in another pool, and an engine that reports the
    name."""
    pools = {"taker": PoolClaim("g", ("other",), created="1"), "theirs": PoolClaim("g", ("llama",), created="2")}
    served = {"taker": ["other", "llama", "loaded"], "theirs": ["llama"]}
    for one in (
        None,
        ModelRule("evil", "llama", "taker", created="3"),
        ModelRule("evil", "llama", "theirs", targets=(("other", 1),), created="3"),
        ModelRule("evil", "llama", "theirs", targets=(("loaded", 1),), created="3"),
    ):
        table = ModelTable(served, [one] if one is not None else [], pools)
        assert table.resolve("llama").pool == "theirs"
    older = ModelRule("older", "llama", "taker", created="0")
    assert ModelTable(served, [older], pools).resolve("llama").pool == "taker"


ADAPTED = rule("s", "sql", adapter="sql@0123456789")


def test_a_rules_adapter_gets_its_requests_and_those_of_targets_that_name_the_rule():
    served = {"a": ["own", "sql@0123456789"]}
    canary = rule("r", targets=(("sql", 1), ("own", 1)), criticality="Critical")
    table = ModelTable(served, [ADAPTED, canary], POOLS)
    assert table.resolve("sql") == ModelTarget("a", "sql@0123456789")
    assert table.resolve("chat", 0.1) == ModelTarget("a", "sql@0123456789", "Critical")
    assert table.resolve("chat", 0.9) == ModelTarget("a", "own", "Critical")
    assert table.names() == ["own", "chat", "sql"], "versions are the operator's matter"


def test_a_pools_model_may_be_named_like_a_version():
    dated = "qwen@2024011512"
    table = ModelTable({"a": [dated]}, [rule("r")], {"a": PoolClaim("g", (dated,))})
    assert table.resolve("chat").target == table.resolve(None).target == dated
    assert table.names() == [dated, "chat"]


def test_an_adapter_that_is_not_loaded_yet_is_not_the_model_without_it():
    waits = rule("s", "sql", adapter="sql@")
    assert ModelTable({"a": ["own"]}, [waits], POOLS).resolve("sql").target == "sql@"


def test_versions_of_adapters_take_no_alias_and_no_nameless_request_from_the_only_model():
    table = ModelTable({"a": ["own", "sql@0123456789"]}, [rule("r")], POOLS)
    assert table.resolve("chat").target == "own"
    assert table.resolve(None).target == "own"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("own:lora", ModelTarget("a", "lora")),
        ("own:sql", ModelTarget("a", "sql@0123456789")),
        ("o:w:lora", ModelTarget("a", "lora")),
        ("own:l:b", ModelTarget("a", "l:b")),
        ("own:x:y", ModelTarget("a", "own:x:y")),
        ("own:none", None),
        ("other:lora", None),
        ("lora", ModelTarget("a", "lora")),
        (":lora", None),
        ("own:", None),
        (":" * 4096, None),
    ],
)
def test_base_and_adapter_name_the_adapter(name, expected):
    served = {"a": ["own", "o:w", "lora", "l:b", "own:x:y"], "b": ["other"]}
    table = ModelTable(served, [ADAPTED], POOLS)
    if expected is None:
        with pytest.raises(ModelNotFound):
            table.resolve(name)
    else:
        assert table.resolve(name) == expected
