"""A pool's plan uses the optional APIs of a cluster: routes, the upstream pool, monitors."""

from __future__ import annotations

import pytest
from support.pool_world import EVERY_API, SimCluster, a_pool, kinds
from treeline_operator.actions import Delete
from treeline_operator.world import Platform
from treeline_wire.paths import INFERENCE


def test_absent_apis_are_reported_and_used_when_they_appear() -> None:
    pool = a_pool(gateway={"parentRefs": [{"name": "front"}]})
    cluster = SimCluster()
    plan = cluster.plan(pool)
    assert any("does not have gateway.networking.k8s.io/v1/HTTPRoute" in note for note in plan.notes)
    assert any("does not have inference.networking.k8s.io/v1/InferencePool" in note for note in plan.notes)
    cluster.do(plan)
    cluster.platform = Platform(apis=EVERY_API)
    assert {action.ref.kind for action in cluster.plan(pool).actions} == {
        "PodMonitor",
        "InferencePool",
        "HTTPRoute",
    }


def test_a_kind_that_may_not_be_read_is_not_reported_as_absent() -> None:
    cluster = SimCluster(Platform(apis=EVERY_API - {"gateway.networking.k8s.io/v1/HTTPRoute"}, forbidden=EVERY_API))
    notes = cluster.plan(a_pool(gateway={"parentRefs": [{"name": "front"}]})).notes
    assert "the operator may not list and watch gateway.networking.k8s.io/v1/HTTPRoute: check its role" in notes


def test_an_api_briefly_missing_from_discovery_removes_nothing() -> None:
    pool = a_pool(gateway={"parentRefs": [{"name": "front"}]})
    cluster = SimCluster(Platform(apis=EVERY_API))
    cluster.converge(pool)
    for missed in EVERY_API:
        cluster.platform = Platform(apis=EVERY_API - {missed})
        assert cluster.plan(pool).actions == (), missed
    cluster.platform = Platform()
    gone = {action.ref.kind for action in cluster.plan(a_pool()).actions if isinstance(action, Delete)}
    assert gone == {"HTTPRoute", "InferencePool"}, "what is not asked for any more goes"


def test_the_oldest_of_several_pools_takes_unclaimed_names() -> None:
    gateway = {"parentRefs": [{"name": "front"}], "hostnames": ["llm.example.com"]}
    older = a_pool("older", uid="older-uid", gateway=gateway, endpointPicker={"failureMode": "FailClose"})
    young = {"creationTimestamp": "2026-11-02T00:00:00Z"}
    named = {"uri": "builtin://tiny", "name": "other"}
    younger = a_pool("younger", metadata=young, model=named, gateway={"parentRefs": [{"name": "front"}]})
    cluster = SimCluster(Platform(apis=EVERY_API))
    cluster.others = (older,)
    cluster.do(cluster.plan(younger))
    route = cluster.get("HTTPRoute", "younger")["spec"]
    for match in (match for rule in route["rules"] for match in rule["matches"]):
        assert match["headers"] == [{"type": "Exact", "name": "X-Gateway-Model-Name", "value": "other"}]
    assert route["hostnames"] == ["llm.example.com"]
    mirror = cluster.get("InferencePool", "younger-gie")["spec"]
    assert mirror["endpointPickerRef"]["failureMode"] == "FailClose"


@pytest.mark.parametrize(
    ("hosts", "theirs", "parent", "routed"),
    [
        ((), (), "front", False),
        (("a.example.com",), ("*.example.com",), "front", False),
        (("a.example.com",), ("b.example.com",), "front", True),
        (("a.example.com",), ("a.example.com",), "back", True),
    ],
)
def test_a_younger_pool_gets_no_route_for_a_name_that_an_older_one_has_at_the_same_host(
    hosts: tuple[str, ...], theirs: tuple[str, ...], parent: str, routed: bool
) -> None:
    """The younger pool's route would match the model's name, and so precede the older pool's, which matches every
    name."""
    older = a_pool("older", uid="older-uid", gateway={"parentRefs": [{"name": "front"}], "hostnames": hosts})
    young = {"creationTimestamp": "2026-11-02T00:00:00Z"}
    younger = a_pool("younger", metadata=young, gateway={"parentRefs": [{"name": parent}], "hostnames": theirs})
    cluster = SimCluster(Platform(apis=EVERY_API))
    cluster.others = (older,)
    plan = cluster.plan(younger)
    assert ("HTTPRoute" in {action.ref.kind for action in plan.actions}) is routed
    assert any("are pool older's: no HTTPRoute is made" in note for note in plan.notes) is not routed


@pytest.mark.parametrize("engine", sorted(INFERENCE))
def test_a_gateway_routes_the_inference_paths_of_the_pools_engine_and_nothing_else(engine: str) -> None:
    gateway = {"parentRefs": [{"name": "front"}]}
    custom = {"image": "example.com/engine:1"} if engine == "custom" else {}
    pool = a_pool("tiny", gateway=gateway, engine={"type": engine, **custom})
    cluster = SimCluster(Platform(apis=EVERY_API))
    cluster.do(cluster.plan(pool))
    rules = cluster.get("HTTPRoute", "tiny")["spec"]["rules"]
    assert len(rules) <= 16
    assert all(len(rule["matches"]) <= 8 for rule in rules)
    routed = {
        (match["path"]["type"], match["path"]["value"], match["method"]) for rule in rules for match in rule["matches"]
    }
    assert routed == {
        ("PathPrefix" if rule.path == "/v1/models" else "Exact", rule.path, method)
        for rule in INFERENCE[engine]
        for method in rule.methods
    }
    assert sum(len(rule["matches"]) for rule in rules) == len(routed)
    assert not any(kind == "PathPrefix" and path != "/v1/models" for kind, path, _ in routed)


def test_a_pool_that_disagrees_on_the_kind_of_gateway_follows_the_oldest() -> None:
    older = a_pool("older", uid="older-uid")
    younger = a_pool(
        "younger",
        metadata={"creationTimestamp": "2026-11-02T00:00:00Z"},
        gateway={"parentRefs": [{"name": "front"}]},
    )
    cluster = SimCluster(Platform(apis=EVERY_API))
    cluster.others = (older,)
    assert not any("HTTPRoute" in kind for kind in kinds(cluster.plan(younger)))
