"""Objectives and rewrites of GIE 1.5: precedence, weights, priorities, and trusted headers."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import msgspec
import pytest
from treeline_epp.kube.gateway_rules import read_objective, read_rewrite
from treeline_epp.picking.request import Request
from treeline_epp.requests.body import RouteRequest
from treeline_epp.requests.gateway_rules import GatewayRules
from treeline_epp.requests.model_registry import ModelRegistry
from treeline_epp.requests.parse import parse
from treeline_epp.requests.refusals import Refusal
from treeline_wire import headers as names
from treeline_wire.gateway_rules import ModelRewrite, Objective, RewriteRule

OBJECTIVES = [Objective("urgent", "p", 4), Objective("batch", "p", -1), Objective("theirs", "q", 9)]


def registry(*models: str) -> ModelRegistry:
    made = ModelRegistry()
    made.set_endpoint("e", "p", models or ("base", "base-v2"), None)
    return made


def rules(*rewrites: ModelRewrite, trust: bool = True) -> GatewayRules:
    made = GatewayRules(trust_headers=trust)
    made.set(OBJECTIVES, rewrites)
    return made


def rewrite(
    name: str, *of: tuple[str | None, str], created: str = "2026-01-01T00:00:00Z", pool: str = "p"
) -> ModelRewrite:
    made = (RewriteRule(((target, 1),), frozenset() if model is None else frozenset({model})) for model, target in of)
    return ModelRewrite(name, pool, tuple(made), created)


def ask(
    given: GatewayRules, model: str = "base", served: ModelRegistry | None = None, /, **headers: str
) -> Request | Refusal:
    get = headers.get(":method") == "GET"
    data = b"" if get else json.dumps({"model": model, "prompt": "x"}).encode()
    fields = {":path": "/v1/completions", ":method": "POST", **headers}
    found = parse(RouteRequest(fields, data, None), served or registry(), rules=given)
    assert isinstance(found, Request | Refusal)
    return found


def pick(*args: Any, **more: Any) -> Request:
    parsed = ask(*args, **more)
    assert isinstance(parsed, Request), parsed
    return parsed


@pytest.mark.parametrize("header", [names.OBJECTIVE, names.OBJECTIVE_LLMD])
def test_an_objective_gives_its_priority_and_a_negative_one_is_sheddable(header: str) -> None:
    found = {name: pick(rules(), **{header: name}) for name in ("urgent", "batch", "unknown", "theirs", "")}
    assert {name: (one.priority, one.sheddable) for name, one in found.items()} == {
        "urgent": (4, False),
        "batch": (-1, True),
        "unknown": (0, False),
        "theirs": (0, False),
        "": (0, False),
    }
    assert pick(rules(), **{":method": "GET", header: "batch"}).sheddable, "without a body too"


def test_headers_count_only_where_they_are_trusted() -> None:
    said = {names.OBJECTIVE: "batch", names.MODEL_REWRITE: "base-v2"}
    unheard = pick(rules(trust=False), **said)
    assert (unheard.priority, unheard.sheddable, unheard.model) == (0, False, "base")
    assert pick(rules(), **said).model == "base-v2"


def test_a_rule_overrides_the_header_and_the_header_the_body() -> None:
    header = {names.MODEL_REWRITE: "base-v2"}
    parsed = pick(rules(), **header)
    assert (parsed.model, parsed.rewrite) == ("base-v2", "base-v2")
    ruled = pick(rules(rewrite("r", ("alias", "base"))), "alias", **header)
    assert (ruled.model, ruled.rewrite) == ("base", "base")
    both = {names.MODEL_REWRITE: "base", names.MODEL_REWRITE_LLMD: "base-v2"}
    assert pick(rules(), **both).model == "base-v2"


def test_an_exact_match_wins_then_the_older_object_then_the_first_rule() -> None:
    old, new = "2025-01-01T00:00:00Z", "2026-06-01T00:00:00Z"
    general = rewrite("general", (None, "base-v2"), created=old)
    exact = rewrite("exact", ("alias", "base"), ("alias", "base-v2"), created=new)
    newest = rewrite("newest", ("alias", "base-v2"), (None, "base"), created="2026-07-01T00:00:00Z")
    for order in ([general, exact, newest], [newest, exact, general]):
        given = rules(*order)
        assert pick(given, "alias").model == "base"
        assert pick(given, "whatever").model == "base-v2", "of the only pool"
        assert pick(given, "base").model == "base-v2"


def test_targets_are_drawn_by_weight_and_the_rest_of_a_draw_is_uniform() -> None:
    rule = RewriteRule((("a", 3), ("b", 0), ("c", 1)))
    drawn = [rule.draw(i / 1000) for i in range(1000)]
    assert Counter(name for name, _ in drawn) == {"a": 750, "c": 250}
    assert all(0 <= rest < 1 for _, rest in drawn)
    assert Counter(rest < 0.5 for name, rest in drawn if name == "a") == {True: 375, False: 375}
    even = RewriteRule((("a", 0), ("b", 0)))
    assert Counter(even.draw(i / 10)[0] for i in range(10)) == {"a": 5, "b": 5}


def test_a_target_that_no_pool_serves_is_a_404_of_its_name() -> None:
    refused = ask(rules(rewrite("r", ("base", "gone"))))
    assert isinstance(refused, Refusal)
    assert (refused.status, "gone" in refused.message) == (404, True)


def test_a_rule_of_one_pool_leaves_the_models_of_others_alone() -> None:
    served = ModelRegistry()
    served.set_endpoint("e", "p", ("base", "base-v2"), None)
    served.set_endpoint("f", "q", ("other",), None)
    given = rules(rewrite("r", (None, "base-v2")))
    for model, pool, target in (("base", "p", "base-v2"), ("other", "q", "other")):
        found = pick(given, model, served)
        assert (found.pool, found.model) == (pool, target)


def obj(spec: dict[str, Any], **meta: Any) -> msgspec.Raw:
    return msgspec.Raw(json.dumps({"metadata": {"name": "o", **meta}, "spec": spec}).encode())


def test_a_rewrite_takes_no_name_that_another_pool_serves() -> None:
    """It holds for a rewrite of any age; names that no pool serves belong to the oldest rewrite."""
    given = rules(rewrite("taker", ("base", "other"), ("free", "other"), pool="q", created="2020-01-01T00:00:00Z"))
    both = registry()
    both.set_endpoint("f", "q", ("other",), None)
    for model, pool in (("base", "p"), ("free", "q")):
        assert pick(given, model, both).pool == pool


def test_objects_are_read_by_their_crds() -> None:
    ref = {"name": "p"}
    found = read_objective(obj({"poolRef": ref, "priority": -3}))
    assert found is not None
    assert (found[0].group, found[1]) == ("inference.networking.k8s.io", Objective("o", "p", -3))
    assert read_objective(obj({"poolRef": ref}))[1].priority == 0  # type: ignore[index]
    assert read_objective(obj({"poolRef": ref}, deletionTimestamp="2026-01-01T00:00:00Z")) is None
    spec = {
        "poolRef": {**ref, "group": "treeline.dev"},
        "rules": [
            {
                "matches": [{"model": {"type": "Exact", "value": "a"}}, {"model": {"value": "b"}}],
                "targets": [{"modelRewrite": "x", "weight": 9}, {"modelRewrite": "y"}],
            },
            {"matches": [{"model": {"type": "Prefix", "value": "c"}}], "targets": [{"modelRewrite": "z"}]},
            {"targets": [{"modelRewrite": "w"}]},
        ],
    }
    read = read_rewrite(obj(spec, creationTimestamp="2026-01-01T00:00:00Z"))
    assert read is not None
    assert read[0].group == "treeline.dev"
    assert read[1].rules == (
        RewriteRule((("x", 9), ("y", 0)), frozenset({"a", "b"})),
        RewriteRule((("w", 0),)),
    ), "a match that is not understood is no rule for all"
    with pytest.raises(msgspec.MsgspecError):
        read_rewrite(obj({"rules": []}))


def test_a_configured_header_alone_identifies_the_client() -> None:
    headers = {names.FAIRNESS_ID: "told", "x-team": "ours"}
    assert rules().fairness_id(headers) == "told"
    assert rules(trust=False).fairness_id(headers) == ""
    for trust in (True, False):
        own = GatewayRules(trust_headers=trust, fairness_header="x-team")
        assert own.fairness_id(headers) == "ours"
        assert own.fairness_id({names.FAIRNESS_ID: "told"}) == ""
