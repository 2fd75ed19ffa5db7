"""The gateway's plan during changes: sharing, leaving, repairs, recreation, and rolls of pods."""

from __future__ import annotations

import dataclasses
import re

import pytest
from support.gateway_cluster import ATTACHED, Cluster, container, converged, pool
from treeline_operator.actions import Apply, Delete, Scale
from treeline_operator.plan import edge, epp, gateway_common
from treeline_operator.plan.gateway import plan_gateway
from treeline_operator.plan.shared_gateway import FIELDS
from treeline_operator.world import Images, Observed, Platform


def test_attaching_to_an_existing_gateway_removes_envoy_and_detaching_restores_it() -> None:
    cluster, standalone, attached = converged(pool("a")), pool("a"), pool("a", **ATTACHED)
    before = sorted(ref for ref in cluster.objects if ref.kind != "Pod")
    cluster.converge(attached)
    assert not [ref for ref in cluster.objects if "edge" in ref.name]
    assert cluster.names("Service") == ["treeline-epp", "treeline-epp-peers"]
    cluster.converge(standalone)
    assert sorted(ref for ref in cluster.objects if ref.kind != "Pod") == before


def test_pools_join_and_leave_without_rolls_and_the_last_removes_everything() -> None:
    a, b = pool("a"), pool("b", created=1)
    cluster = converged(a)
    (plan,) = cluster.converge(a, b)
    assert [action.ref.name for action in plan.actions] == ["treeline-gateway"]
    # The oldest goes: the next one owns, the gateway stays.
    (plan,) = cluster.converge(b)
    assert [action.ref.name for action in plan.actions] == ["treeline-gateway"]
    anchor = cluster.get("ConfigMap", "treeline-gateway")
    assert [owner["uid"] for owner in anchor["metadata"]["ownerReferences"]] == ["uid-b"]
    # A last pool that is being deleted changes nothing.
    going = pool("b", created=1, deleting=True, endpointPicker={"policy": "random"})
    assert plan_gateway(cluster.world(going)).actions == ()
    cluster.roll_out()
    cluster.collect(living=set())
    assert {ref.kind for ref in cluster.objects} <= {"Pod"}
    assert plan_gateway(cluster.world()).actions == ()


def test_a_gateway_that_the_last_pool_left_for_another_is_taken_down() -> None:
    cluster, moved = converged(pool("a")), pool("a", gateway={"name": "other"})
    (gone,) = plan_gateway(cluster.world(moved)).actions
    assert isinstance(gone, Delete)
    assert gone.ref.name == "treeline-gateway"
    cluster.do((gone,))
    cluster.collect({"uid-a"})
    assert {ref.kind for ref in cluster.objects} <= {"Pod"}


def test_an_unreadable_pool_freezes_the_gateway() -> None:
    cluster, p = converged(pool("a")), pool("a")
    meta = {"name": "strange", "namespace": "ns", "uid": "uid-strange"}
    strange = Observed.of({"apiVersion": "treeline.dev/v1alpha1", "kind": "InferencePool", "metadata": meta})
    held = dataclasses.replace(cluster.world(), unreadable=(strange,))
    assert plan_gateway(held).actions == ()
    assert plan_gateway(held).notes == ("pool strange cannot be read; the gateway stays as it is",)
    shared = dataclasses.replace(cluster.world(p), unreadable=(strange,))
    (anchor,) = plan_gateway(shared).actions
    assert isinstance(anchor, Apply)
    assert [o["uid"] for o in anchor.object["metadata"]["ownerReferences"]] == ["uid-a", "uid-strange"]
    cluster.do((anchor,))
    assert plan_gateway(dataclasses.replace(cluster.world(p), unreadable=(strange,))).actions == ()


def test_the_oldest_pool_decides_except_protections_and_the_plan_names_overruled_pools() -> None:
    a, b = (
        pool("a"),
        pool("b", created=1, endpointPicker={"policy": "random", "replicas": 2, "failureMode": "FailClose"}),
    )
    cluster = Cluster()
    cluster.converge(b, a)
    assert "--policy=treeline" in container(cluster, "treeline-epp")["args"]
    assert plan_gateway(cluster.world(a, b)).notes == (
        "pool a: endpointPicker.failureMode is FailOpen here, FailClose in pool b (stricter)",
        "pool b: endpointPicker.replicas is 2 here, 1 in pool a (older)",
    )
    cluster.converge(b)
    assert "--policy=random" in container(cluster, "treeline-epp")["args"]
    assert cluster.get("Deployment", "treeline-epp")["spec"]["replicas"] == 2


def test_a_deleted_anchor_is_awaited_and_created_again() -> None:
    cluster, p = converged(pool("a")), pool("a")
    anchor = cluster.get("ConfigMap", "treeline-gateway")
    anchor["metadata"]["deletionTimestamp"] = "2026-11-28T12:00:00Z"
    plan = plan_gateway(cluster.world(p))
    assert plan.actions == ()
    assert plan.recheck_s
    cluster.objects = {ref: obj for ref, obj in cluster.objects.items() if obj is not anchor}
    cluster.collect({"uid-a"})
    cluster.converge(p)
    assert cluster.names("Deployment") == ["treeline-edge", "treeline-epp"]


def test_children_of_a_former_gateway_are_awaited_not_adopted() -> None:
    """A pool that is deleted and created again meets the children of its former gateway before they are collected. The
    former picker's keys disappear too, and the operator cannot see them."""
    cluster, p = converged(pool("a")), pool("a")
    cluster.get("ConfigMap", "treeline-gateway")["metadata"]["uid"] = "uid-of-the-next"
    plan = plan_gateway(cluster.world(p))
    assert plan.actions == ()
    assert plan.recheck_s
    assert "treeline-epp" in plan.notes[0]
    cluster.collect({"uid-a"})
    assert cluster.names("Deployment") == []
    cluster.secrets.clear()
    cluster.converge(p)
    assert cluster.names("Deployment") == ["treeline-edge", "treeline-epp"]
    assert cluster.secrets == ["treeline-kv-keys"]


def test_manual_changes_are_reverted_and_fields_of_others_stay() -> None:
    cluster, p = converged(pool("a")), pool("a")
    service = cluster.get("Service", "treeline-gateway")
    service["spec"]["clusterIP"] = "10.0.0.1"
    service["metadata"]["annotations"]["theirs"] = "1"
    assert plan_gateway(cluster.world(p)).actions == ()
    service["spec"]["ports"][0]["port"] = 81
    container(cluster, "treeline-epp")["image"] = "example.com/other"
    drifts = {a.ref.name: a.drift for a in plan_gateway(cluster.world(p)).actions if isinstance(a, Apply)}
    assert drifts == {
        "treeline-gateway": ("spec.ports[80,TCP]",),
        "treeline-epp": ("spec.template.spec.containers[epp].image",),
    }
    cluster.converge(p)
    assert service["metadata"]["annotations"]["theirs"] == "1"
    assert cluster.get("Service", "treeline-gateway")["spec"]["clusterIP"] == "10.0.0.1"


NEWER = Platform(images=Images(epp="epp:2", edge="edge:2"))


def make_other_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Render pickers and Envoys from now on as another release of the operator does."""
    monkeypatch.setattr(gateway_common, "LINGER_S", 9)
    monkeypatch.setattr(edge, "_LINGER_S", 19)
    monkeypatch.setattr(edge, "ADMIN_PORT", 19901)
    picker, envoy = epp.arguments, edge.arguments
    monkeypatch.setattr(epp, "arguments", lambda context: [*picker(context), "--newer"])
    monkeypatch.setattr(edge, "arguments", lambda context: envoy(context)[:-1])


@pytest.mark.parametrize("other_pods", [False, True])
def test_an_operator_upgrade_rolls_nothing(other_pods: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    p, cluster, platform = pool("a"), converged(pool("a")), NEWER
    if other_pods:
        make_other_pods(monkeypatch)
    before = {name: cluster.get("Deployment", name)["spec"] for name in cluster.names("Deployment")}
    plan = plan_gateway(cluster.world(p, platform=platform))
    assert plan.actions == ()
    left_alone = [note for note in plan.notes if "stay unchanged" in note]
    assert len(left_alone) == (2 if other_pods else 0)
    # Its number of pods is not the template's.
    more = pool("a", endpointPicker={"replicas": 2}, gateway={"standalone": {"replicas": 4}})
    plans = cluster.converge(more, platform=platform)
    assert {type(a) for plan in plans for a in plan.actions if a.ref.kind == "Deployment"} == {Scale}
    for name, spec in before.items():
        now = cluster.get("Deployment", name)["spec"]
        assert now["template"] == spec["template"]
        assert now["replicas"] == {"treeline-epp": 2, "treeline-edge": 4}[name]


def test_a_change_of_the_spec_is_made_by_the_newest_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = converged(pool("a"))
    make_other_pods(monkeypatch)
    changed = pool("a", endpointPicker={"policy": "random"})
    cluster.converge(changed, platform=NEWER)
    assert container(cluster, "treeline-epp")["image"] == "epp:2"
    # Envoy was not asked to be anything else.
    assert container(cluster, "treeline-edge")["image"] == "treeline-edge:latest"
    # A rollback of the operator leaves alone what the newer one made.
    monkeypatch.undo()
    assert plan_gateway(cluster.world(changed, platform=Platform())).actions == ()


def test_an_old_envoy_whose_configuration_was_deleted_is_created_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, p = converged(pool("a")), pool("a")
    make_other_pods(monkeypatch)
    ref = next(ref for ref in cluster.objects if re.fullmatch("treeline-edge-[0-9a-f]{10}", ref.name))
    del cluster.objects[ref]
    cluster.converge(p, platform=NEWER)
    assert container(cluster, "treeline-edge")["image"] == "edge:2"
    assert container(cluster, "treeline-epp")["image"] == "treeline-epp:latest"


PARTS = {
    "keys": {"gateway": {"standalone": {"apiKeysSecretRef": {"name": "keys"}}}},
    "shared keys": {"gateway": {"isolation": "Shared", "standalone": {"apiKeysSecretRef": {"name": "keys"}}}},
    "foreign engine": {"engine": {"type": "vllm"}, "accelerator": {"type": "nvidia"}},
    "foreign engine, keys": {
        "engine": {"type": "vllm"},
        "accelerator": {"type": "nvidia"},
        "gateway": {"standalone": {"apiKeysSecretRef": {"name": "keys"}}},
    },
    "tls": {"gateway": {"standalone": {"tls": {"secretRef": {"name": "cert"}}}}},
    "picker tls": {"gateway": {"standalone": {"pickerTls": {"secretRef": {"name": "cert"}}}}},
    "limits": {"gateway": {"standalone": {"limits": {"unansweredRequests": 7, "connections": 99}}}},
    "routing shown": {"gateway": {"standalone": {"exposeRouting": True}}},
    "console": {"gateway": {"standalone": {"console": True}}},
    "quotas": {
        "endpointPicker": {"flowControl": {"enabled": True, "quotas": {"configMapRef": {"name": "quotas"}}}},
    },
    "parameters": {"endpointPicker": {"parameters": {"maxBodyBytes": 4096, "trustRequestHeaders": True}}},
    "refuses": {"endpointPicker": {"failureMode": "FailClose"}},
    "drain": {"drain": {"timeoutSeconds": 900}},
    "traces": {"tracing": {"endpoint": "http://collector:4317"}},
    "attached": ATTACHED,
    "tokenizers": {"engine": {"type": "sglang"}, "model": {"uri": "hf://org/name"}},
}


@pytest.mark.parametrize("what", PARTS)
def test_every_change_of_a_pool_reaches_the_pods(what: str) -> None:
    """Pods stay while their inputs stay: a missing input would hide a change from them."""
    changed = pool("a", **PARTS[what])
    for first, then in ((pool("a"), changed), (changed, pool("a", gateway={"unprotected": [*FIELDS]}))):
        cluster = converged(first)
        cluster.converge(then)
        anew = converged(then)
        assert cluster.names("Deployment") == anew.names("Deployment")
        for name in anew.names("Deployment"):
            assert cluster.get("Deployment", name)["spec"] == anew.get("Deployment", name)["spec"], name
