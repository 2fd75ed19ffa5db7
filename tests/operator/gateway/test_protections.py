"""A gateway's protections: the strictest setting applies, and outlives the pool that made it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.gateway_cluster import Cluster, container, pool
from treeline_operator.api.pool import InferencePool
from treeline_operator.plan.gateway import plan_gateway, shared
from treeline_operator.plan.shared_gateway import FIELDS, Protection, SharedGateway, in_force, read, stated, written

KEYS = {"apiKeysSecretRef": {"name": "clients"}}
TLS = {"tls": {"secretRef": {"name": "certificate"}}}
PICKER_TLS = {"pickerTls": {"secretRef": {"name": "mutual"}}}
STATEMENTS: dict[str, dict[str, Any]] = {
    "ApiKeys": {"gateway": {"standalone": KEYS, "isolation": "Shared"}},
    "Tls": {"gateway": {"standalone": TLS}},
    "PickerTls": {"gateway": {"standalone": PICKER_TLS}},
    "FailClose": {"endpointPicker": {"failureMode": "FailClose"}},
}


def seen(cluster: Cluster, *pools: InferencePool) -> SharedGateway:
    found = shared(cluster.world(*pools))
    assert found is not None
    return found


def envoy(cluster: Cluster) -> dict[str, Any]:
    """Return the Secrets of Envoy's pods, their arguments and configuration."""
    deployment = cluster.get("Deployment", "treeline-edge")
    volumes = deployment["spec"]["template"]["spec"]["volumes"]
    secrets = {one["name"]: one["secret"]["secretName"] for one in volumes if "secret" in one}
    config = next(one["configMap"]["name"] for one in volumes if one["name"] == "config")
    return {**secrets, "args": container(cluster, "treeline-edge")["args"], **cluster.get("ConfigMap", config)["data"]}


@pytest.mark.parametrize("name", STATEMENTS)
def test_protections_outlive_the_oldest_pool_until_dropped(name: str) -> None:
    a, b = pool("a", **STATEMENTS[name]), pool("b", created=1)
    cluster = Cluster()
    cluster.converge(a, b)
    before = envoy(cluster)
    cluster.converge(pool("a", deleting=True, **STATEMENTS[name]), b)
    cluster.converge(b)
    assert envoy(cluster) == before
    assert seen(cluster, b).retained == [name]
    notes = plan_gateway(cluster.world(b)).notes
    assert any(f"gateway.unprotected: [{name}] drops it" in note for note in notes), notes
    dropping = pool("b", created=1, gateway={"unprotected": [name]})
    cluster.converge(dropping)
    assert seen(cluster, dropping).retained == []
    assert envoy(cluster) != before
    # What was dropped does not come back, and a pool that comes later may state it again.
    cluster.converge(b)
    assert envoy(cluster) != before
    cluster.converge(b, pool("c", created=2, **STATEMENTS[name]))
    assert envoy(cluster) == before


def test_clients_stay_isolated_when_the_pool_with_the_keys_is_deleted() -> None:
    a, b = pool("a", gateway={"standalone": KEYS}), pool("b", created=1, gateway={"isolation": "Shared"})
    cluster = Cluster()
    cluster.converge(a, b)
    before = envoy(cluster)
    assert before["api-keys"] == "clients"
    cluster.converge(b)
    assert envoy(cluster) == before
    assert seen(cluster, b).retained == ["ApiKeys", "Isolation"]
    cluster.converge(pool("b", created=1, gateway={"isolation": "Shared", "unprotected": ["Isolation"]}))
    assert envoy(cluster)["api-keys"] == "clients"
    assert envoy(cluster) != before


@pytest.mark.parametrize("name", STATEMENTS)
def test_a_pool_can_withdraw_its_own_protections(name: str) -> None:
    cluster = Cluster()
    cluster.converge(pool("a"), pool("b", created=1))
    before = envoy(cluster)
    cluster.converge(pool("a"), pool("b", created=1, **STATEMENTS[name]))
    assert envoy(cluster) != before, "the strictest holds, and not the oldest"
    cluster.converge(pool("a"), pool("b", created=1))
    assert envoy(cluster) == before


def test_a_pool_of_the_same_name_is_another_one() -> None:
    cluster = Cluster()
    cluster.converge(pool("a", **STATEMENTS["ApiKeys"]), pool("b", created=1))
    again = pool("a", created=2)
    again = again.model_copy(update={"metadata": again.metadata.model_copy(update={"uid": "uid-another"})})
    cluster.converge(again, pool("b", created=1))
    assert envoy(cluster)["api-keys"] == "clients"


def test_the_oldest_pools_secret_wins_and_the_other_pools_status_says_so() -> None:
    other = {"gateway": {"standalone": {"apiKeysSecretRef": {"name": "others"}}, "isolation": "Shared"}}
    a, b = pool("a", **STATEMENTS["ApiKeys"]), pool("b", created=1, **other)
    cluster = Cluster()
    cluster.converge(b, a)
    assert envoy(cluster)["api-keys"] == "clients"
    (told,) = seen(cluster, a, b).conflicts["b"]
    assert told == "gateway.standalone.apiKeysSecretRef.name is others here, clients in pool a (older)"


@pytest.mark.parametrize("record", ["", "{", "[]", '{"ApiKeys": 1}', '{"Unknown": {"secret": "", "pools": ["u"]}}'])
def test_an_unreadable_record_counts_as_empty(record: str) -> None:
    assert in_force([pool("a")], read(record)) == {}


SETS = st.sets(st.sampled_from(sorted(STATEMENTS)))


@given(st.lists(st.tuples(SETS, SETS), min_size=1, max_size=4), st.dictionaries(st.sampled_from(sorted(FIELDS)), SETS))
def test_only_an_existing_pool_drops_protections(rows: Any, before: Any) -> None:
    members = []
    for index, (states, unprotected) in enumerate(rows):
        standalone = {key: value for name, part in (("ApiKeys", KEYS), ("Tls", TLS), ("PickerTls", PICKER_TLS))
                      if name in states for key, value in part.items()}  # fmt: skip
        gateway = {"standalone": standalone, "unprotected": sorted(unprotected), "isolation": "Shared"}
        mode = {"failureMode": "FailClose" if "FailClose" in states else "FailOpen"}
        members.append(pool(f"p{index}", created=index, gateway=gateway, endpointPicker=mode))
    there = {one.metadata.uid for one in members}
    record = {
        name: Protection("s", tuple(sorted(f"uid-p{len(who)}" for who in [states]))) for name, states in before.items()
    }
    found = in_force(members, read(written(record)))
    assert read(written(found)) == found
    assert json.loads(written(found)).keys() == found.keys()
    for name in FIELDS:
        stating = [one for one in members if name in stated(one)]
        off = any(name in unprotected for _, unprotected in rows)
        gone = name in record and not there.issuperset(record[name].pools)
        assert (name in found) is (bool(stating) or (gone and not off))
        if stating:
            assert found[name].pools == tuple(one.metadata.uid for one in stating)
