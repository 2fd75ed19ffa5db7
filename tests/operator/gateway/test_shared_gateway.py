"""A gateway uses the settings of its oldest pool, in whatever order pools are seen."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.gateway_cluster import pool
from treeline_operator.api.pool import InferencePool
from treeline_operator.plan import shared_gateway as module
from treeline_operator.plan.shared_gateway import SharedGateway, share


def picker(**settings: Any) -> dict[str, Any]:
    return {"endpointPicker": settings}


def edge(**settings: Any) -> dict[str, Any]:
    return {"gateway": {"standalone": settings}}


def of(sharing: Mapping[str, SharedGateway], pool: InferencePool) -> SharedGateway:
    return sharing[pool.spec.gateway.name]


def conflicts(sharing: Mapping[str, SharedGateway], pool: InferencePool) -> tuple[str, ...]:
    return of(sharing, pool).conflicts.get(pool.name, ())


def traced(endpoint: str) -> dict[str, Any]:
    return {"tracing": {"endpoint": endpoint}}


def requests(cpu: str) -> dict[str, Any]:
    return picker(resources={"requests": {"cpu": cpu}})


CERT = {"secretRef": {"name": "cert"}}
PARENT = {"gateway": {"parentRefs": [{"name": "inference"}]}}


def test_pools_of_one_gateway_name_share_it_and_others_do_not() -> None:
    a, b, c = pool("a"), pool("b", created=1), pool("c", gateway={"name": "other"})
    sharing = share([b, c, a])
    assert list(sharing) == ["other", "treeline"]
    assert of(sharing, b).members == (a, b)
    assert of(sharing, b).owner is a
    assert of(sharing, c).members == (c,)
    assert [conflicts(sharing, p) for p in (a, b, c)] == [(), (), ()]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (traced("http://a:1"), traced("http://b:1"), "tracing.endpoint is http://b:1 here, http://a:1"),
        ({}, traced("http://b:1"), "tracing.endpoint is http://b:1 here, unset"),
        (picker(failureMode="FailClose"), {}, "endpointPicker.failureMode is FailOpen here, FailClose"),
        (picker(replicas=2), {}, "endpointPicker.replicas is 1 here, 2"),
        ({}, picker(parameters={"maxTtftSeconds": 2}), "endpointPicker.parameters.maxTtftSeconds is 2 here, unset"),
        (requests("1"), requests("1500m"), "endpointPicker.resources.requests.cpu is 1.5 here, 1"),
        ({}, edge(port=8080), "gateway.standalone.port is 8080 here, 80"),
        (edge(annotations={"a.b/c": "nlb"}), {}, "gateway.standalone.annotations[a.b/c] is unset here, nlb"),
        (edge(apiKeysSecretRef={"name": "k"}), {}, "gateway.standalone.apiKeysSecretRef.name is unset here, k"),
        (edge(port=443, tls=CERT), edge(port=443), "gateway.standalone.tls.secretRef.name is unset here, cert"),
        (PARENT, {}, "gateway is standalone here, Gateway API (parentRefs)"),
        (edge(port=81), PARENT, "gateway is Gateway API (parentRefs) here, standalone"),
    ],
)
def test_a_conflict_is_named_with_both_values(old: dict[str, Any], new: dict[str, Any], message: str) -> None:
    a, b = pool("a", created=0, **old), pool("b", created=1, **new)
    sharing = share([b, a])
    assert conflicts(sharing, b) == (f"{message} in pool a (older)",)
    assert conflicts(sharing, a) == ()


def test_the_same_quantity_in_other_words_is_no_conflict() -> None:
    a = pool("a", **picker(resources={"limits": {"cpu": "0.2", "memory": "1Gi"}}))
    b = pool("b", created=1, **picker(resources={"limits": {"cpu": "200m", "memory": "1024Mi"}}))
    assert conflicts(share([a, b]), b) == ()


def test_every_pool_has_a_policy_of_its_own() -> None:
    a = pool("a", **picker(policy="cache_aware", policyParameters={"cacheThreshold": 0.5}))
    b = pool("b", created=1, **picker(policy="round_robin"))
    assert conflicts(share([a, b]), b) == ()


def test_the_owner_alone_names_the_collector_of_the_gateway() -> None:
    a, b = pool("a"), pool("b", created=1, tracing={"endpoint": "http://theirs:4317"})
    assert of(share([a, b]), a).tracing is None, "what the gateway sees of a's requests is not b's"
    assert of(share([b]), b).tracing == b.spec.tracing


def test_attaching_to_different_gateways_is_no_conflict() -> None:
    a = pool("a", gateway={"parentRefs": [{"name": "one"}], "hostnames": ["a.example"]})
    b = pool("b", created=1, gateway={"parentRefs": [{"name": "two"}]})
    assert conflicts(share([a, b]), b) == ()


def test_the_next_oldest_is_promoted_when_the_oldest_is_being_deleted() -> None:
    b, c = pool("b", created=1, **picker(failureMode="FailClose")), pool("c", created=2)
    a = pool("a", deleting=True)
    shared = of(share([c, a, b]), c)
    assert [p.name for p in shared.members] == ["b", "c", "a"]
    assert shared.failure_mode == "FailClose"
    assert not shared.leaving
    assert shared.conflicts == {
        "c": ("endpointPicker.failureMode is FailOpen here, FailClose in pool b (older)",),
        "a": ("endpointPicker.failureMode is FailOpen here, FailClose in pool b",),
    }
    assert of(share([a]), a).leaving


def test_equal_ages_are_distinguished_by_name_and_a_file_is_youngest() -> None:
    pools = [pool("c", created=None), pool("b"), pool("a", created=5)]
    assert [p.name for p in of(share(pools), pools[0]).members] == ["b", "a", "c"]


POOLS = st.lists(
    st.tuples(
        st.sampled_from("abcdefgh"),
        st.integers(0, 3) | st.none(),
        st.booleans(),
        st.sampled_from([{}, picker(failureMode="FailClose"), picker(replicas=3), edge(port=81), PARENT]),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda row: row[0],
)


@given(POOLS, st.randoms(use_true_random=False))
def test_sharing_depends_on_nothing_but_the_pools(rows: list[Any], rng: random.Random) -> None:
    pools = [pool(name, created=day, deleting=gone, **spec) for name, day, gone, spec in rows]
    shuffled = list(pools)
    rng.shuffle(shuffled)
    sharing = share(pools)
    assert sharing == share(shuffled) == share(pools)
    (shared,) = sharing.values()
    assert sorted(p.name for p in shared.members) == sorted(p.name for p in pools)
    strict = shared.failure_mode == "FailClose"
    assert strict is any(p.spec.endpoint_picker.failure_mode == "FailClose" for p in pools)
    # Without the owner, the second of the order owns: promotion is what is left.
    rest = [p for p in pools if p is not shared.owner]
    if rest:
        assert of(share(rest), rest[0]).owner is shared.members[1]
    # A pool that asks for what holds has no conflict, and every other one has.
    held = shared.picker.model_copy(update={"failure_mode": shared.failure_mode})
    for member in shared.members:
        same = (
            member.spec.endpoint_picker == held
            and member.spec.gateway.mode == shared.mode
            and (shared.mode == "gateway-api" or member.spec.gateway.edge == shared.edge)
        )
        assert bool(conflicts(sharing, member)) is not same


def test_only_the_owner_among_hundreds_of_equal_pools_is_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    settings_of = module._settings

    def counted(one: Any) -> Mapping[str, Any]:
        looked.append(one.name)
        return settings_of(one)

    monkeypatch.setattr(module, "_settings", counted)
    pools = [pool(f"p{n:03}") for n in range(299)] + [pool("p299", endpointPicker={"replicas": 2})]
    assert set(of(share(pools), pools[0]).conflicts) == {"p299"}
    assert looked == ["p000", "p299"]
