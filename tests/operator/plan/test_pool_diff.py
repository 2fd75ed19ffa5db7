"""Canonical data, differences, and the writes and deletes that follow."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treeline_operator import names
from treeline_operator.plan.canonical import canonical
from treeline_operator.plan.diff import additions, applying, differences, prune
from treeline_operator.quantity import quantity
from treeline_operator.world import Observed, Ref


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("0.2", "200m"),
        ("1Gi", "1024Mi"),
        ("1000m", "1"),
        (1, "1"),
        (0.5, "500m"),
        ("1e3", "1k"),
        ("1E", "1e18"),
    ],
)
def test_a_quantity_has_one_canonical_form(one: object, other: object) -> None:
    assert quantity(one) == quantity(other)
    assert canonical({"requests": {"cpu": one}}) == canonical({"requests": {"cpu": other}})


@pytest.mark.parametrize("text", ["", "abc", "1 Gi", "1gi", "Gi", True, "1.2.3", "--1", "1Ei5"])
def test_texts_that_are_not_quantities_stay(text: object) -> None:
    assert quantity(text) is None
    assert canonical({"requests": {"cpu": text or "x"}}) == {"requests": {"cpu": text or "x"}}


@settings(deadline=None)
@given(st.decimals(min_value=0, max_value=10**12, places=3))
def test_quantities_keep_their_value(number: Decimal) -> None:
    shown = canonical({"limits": {"memory": str(number)}})["limits"]["memory"]
    assert quantity(shown) == number


def test_texts_of_users_are_not_treated_as_quantities() -> None:
    assert canonical({"labels": {"size": "1Gi"}}) != canonical({"labels": {"size": "1024Mi"}})
    assert canonical({"env": [{"name": "A", "value": "1000m"}]}) != canonical({"env": [{"name": "A", "value": "1"}]})
    assert canonical({"size": "1Gi"}) == canonical({"size": "1024Mi"})


def test_null_and_empty_fields_are_dropped_as_by_the_api_server() -> None:
    given = {"a": None, "b": "", "c": [], "labels": {}, "hostNetwork": False, "emptyDir": {}, "replicas": 0}
    assert canonical(given) == {"emptyDir": {}, "replicas": 0}
    kept = {"automountServiceAccountToken": False, "podSelector": {}}
    assert canonical(kept) == kept


DEPLOYMENT: dict[str, Any] = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "a", "namespace": "n", "labels": {"mine": "1"}},
    "spec": {
        "replicas": 2,
        "template": {
            "spec": {
                "automountServiceAccountToken": False,
                "containers": [
                    {
                        "name": "runtime",
                        "args": ["--a", "1"],
                        "env": [{"name": "A", "value": "1"}],
                        "ports": [{"name": "http", "containerPort": 8000}],
                        "resources": {"requests": {"cpu": "0.5", "memory": "1024Mi"}},
                    }
                ],
                "tolerations": [{"key": "gpu", "operator": "Exists"}],
                "volumes": [{"name": "tmp", "emptyDir": {}}],
            }
        },
    },
}


def observed(**changes: Any) -> dict[str, Any]:
    """Return the deployment as an API server shows it: with defaults, a sidecar, a user's label."""
    container = {
        "name": "runtime",
        "args": ["--a", "1"],
        "env": [{"name": "INJECTED", "value": "x"}, {"name": "A", "value": "1"}],
        "ports": [{"name": "http", "containerPort": 8000, "protocol": "TCP"}],
        "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}},
        "terminationMessagePath": "/dev/termination-log",
    }
    pod = {
        "automountServiceAccountToken": False,
        "containers": [{"name": "sidecar", "image": "x"}, container],
        "tolerations": [{"key": "gpu", "operator": "Exists", "effect": ""}],
        "volumes": [{"name": "tmp", "emptyDir": {}}, {"name": "sidecar", "emptyDir": {}}],
        "dnsPolicy": "ClusterFirst",
    }
    container.update(changes.pop("container", {}))
    pod.update(changes)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "a", "namespace": "n", "uid": "u", "labels": {"mine": "1", "theirs": "2"}},
        "spec": {"replicas": 2, "template": {"spec": pod}, "revisionHistoryLimit": 10},
        "status": {"replicas": 1},
    }


def test_defaults_sidecars_and_labels_of_users_are_no_difference() -> None:
    assert differences(DEPLOYMENT, observed()) == ()


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"container": {"args": ["--a", "2"]}}, "spec.template.spec.containers[runtime].args[1]"),
        ({"container": {"args": ["--a"]}}, "spec.template.spec.containers[runtime].args"),
        (
            {"container": {"env": [{"name": "A", "value": "2"}]}},
            "spec.template.spec.containers[runtime].env[A].value",
        ),
        ({"container": {"env": []}}, "spec.template.spec.containers[runtime].env[A]"),
        ({"container": {"ports": []}}, "spec.template.spec.containers[runtime].ports[8000,TCP]"),
        (
            {"container": {"resources": {"requests": {"cpu": "1", "memory": "1Gi"}}}},
            "spec.template.spec.containers[runtime].resources.requests.cpu",
        ),
        ({"tolerations": []}, "spec.template.spec.tolerations"),
        ({"automountServiceAccountToken": None}, "spec.template.spec.automountServiceAccountToken"),
        ({"volumes": []}, "spec.template.spec.volumes[tmp]"),
        ({"containers": []}, "spec.template.spec.containers[runtime]"),
    ],
)
def test_every_change_of_an_applied_field_is_reported_by_its_path(changes: dict[str, Any], path: str) -> None:
    assert differences(DEPLOYMENT, observed(**changes)) == (path,)


def test_a_policy_with_one_port_too_many_differs_and_a_service_with_one_does_not() -> None:
    def policy(*ports: int) -> dict[str, Any]:
        return {"spec": {"ingress": [{"ports": [{"port": p, "protocol": "TCP"} for p in ports]}]}}

    def service(*ports: int) -> dict[str, Any]:
        return {"spec": {"ports": [{"port": p} for p in ports]}}

    assert differences(policy(1), policy(1)) == ()
    assert differences(policy(1), policy(1, 2)) == ("spec.ingress[0].ports",)
    assert differences(service(1), service(2, 1)) == ()
    assert differences(service(3), service(2, 1)) == ("spec.ports[3,TCP]",)


def test_a_wanted_empty_list_differs_from_a_full_one() -> None:
    assert differences({"spec": {"egress": []}}, {"spec": {}}) == ()
    assert differences({"spec": {"egress": []}}, {"spec": {"egress": [{}]}}) == ("spec.egress",)


def as_seen(write: dict[str, Any], **metadata: Any) -> Observed:
    meta = {**write["metadata"], "uid": "u", "resourceVersion": "1", **metadata}
    return Observed.of({**write, "metadata": meta})


def test_applied_objects_are_not_applied_again() -> None:
    first = applying(DEPLOYMENT, None, "new")
    assert first is not None
    assert first.drift == ()
    assert applying(DEPLOYMENT, as_seen(first.object), "again") is None


def test_foreign_marks_in_desired_objects_are_dropped() -> None:
    metadata = {**DEPLOYMENT["metadata"], "annotations": {names.APPLIED: "mine", "a": "b"}}
    marked = {**DEPLOYMENT, "metadata": metadata}
    first = applying(marked, None, "new")
    assert first is not None
    assert first.object["metadata"]["annotations"].keys() == {names.APPLIED, "a"}
    assert first.object["metadata"]["annotations"][names.APPLIED] != "mine"
    assert applying(marked, as_seen(first.object), "again") is None


def test_a_manual_change_is_drift_and_a_change_of_intent_is_not() -> None:
    first = applying(DEPLOYMENT, None, "new")
    assert first is not None
    changed = {**first.object, "spec": {**first.object["spec"], "replicas": 7}}
    mended = applying(DEPLOYMENT, as_seen(changed), "mend")
    assert mended is not None
    assert mended.drift == ("spec.replicas",)
    intent = {**DEPLOYMENT, "spec": {**DEPLOYMENT["spec"], "minReadySeconds": 3}}
    meant = applying(intent, as_seen(first.object), "new intent")
    assert meant is not None
    assert meant.drift == ()


def test_ignored_paths_cause_no_write() -> None:
    ignore_paths = ("spec.replicas",)
    first = applying(DEPLOYMENT, None, "new", ignore_paths=ignore_paths)
    assert first is not None
    assert first.object["spec"]["replicas"] == 2
    scaled = {**first.object, "spec": {**first.object["spec"], "replicas": 7}}
    assert applying(DEPLOYMENT, as_seen(scaled), "mend", ignore_paths=ignore_paths) is None
    wanting = {**DEPLOYMENT, "spec": {**DEPLOYMENT["spec"], "replicas": 5}}
    assert applying(wanting, as_seen(scaled), "mend", ignore_paths=ignore_paths) is None


def test_a_field_no_longer_set_causes_a_write() -> None:
    first = applying(DEPLOYMENT, None, "new")
    assert first is not None
    fewer = {**DEPLOYMENT, "spec": {k: v for k, v in DEPLOYMENT["spec"].items() if k != "replicas"}}
    assert differences(fewer, as_seen(first.object).object) == ()
    assert applying(fewer, as_seen(first.object), "less") is not None


def child(kind: str, name: str, *, owner: str = "pool-uid", managed: str = names.MANAGER, **meta: Any) -> Observed:
    owners = [{"uid": owner, "controller": True, "kind": "InferencePool", "name": "p", "apiVersion": "x/v1"}]
    return Observed.of(
        {
            "apiVersion": "v1",
            "kind": kind,
            "metadata": {
                "name": name,
                "namespace": "n",
                "uid": f"uid-{name}",
                "labels": {names.MANAGED_BY: managed},
                "ownerReferences": owners,
                **meta,
            },
        }
    )


def test_pruning_deletes_only_our_unwanted_objects() -> None:
    children = [
        child("Service", "wanted"),
        child("Service", "old"),
        child("Service", "theirs", owner="somebody"),
        child("Service", "unlabelled", managed="helm"),
        child("Service", "going", deletionTimestamp="2026-01-01T00:00:00Z"),
        child("PersistentVolumeClaim", "models"),
    ]
    deletes = prune(children, [Ref("v1", "Service", "n", "wanted")], "pool-uid")
    assert [(delete.ref.name, delete.uid) for delete in deletes] == [("old", "uid-old")]


def _edited(kind: str, spec: dict[str, Any], owned: dict[str, Any], **entry: Any) -> Observed:
    meta = {
        "name": "x",
        "namespace": "n",
        "uid": "u",
        "labels": {"app.kubernetes.io/managed-by": "treeline"},
        "managedFields": [{"manager": "somebody", "operation": "Update", "fieldsV1": {"f:spec": owned}, **entry}],
    }
    return Observed.of({"apiVersion": "v1", "kind": kind, "metadata": meta, "spec": spec})


ADDED = {"f:env": {'k:{"name":"X"}': {".": {}, "f:name": {}}}}
ENV = {"f:template": {"f:spec": {"f:containers": {'k:{"name":"c"}': ADDED}}}}
RESTART = {"f:template": {"f:metadata": {"f:annotations": {".": {}, "f:kubectl.kubernetes.io/restartedAt": {}}}}}
PORT = {"f:ports": {'k:{"port":81,"protocol":"TCP"}': {".": {}, "f:port": {}}}}


@pytest.mark.parametrize(
    ("kind", "spec", "owned", "entry", "found"),
    [
        ("Deployment", {}, ENV, {}, 1),
        ("Deployment", {}, ENV, {"manager": "treeline-operator"}, 0),
        ("Deployment", {}, {"f:replicas": {}}, {"subresource": "scale"}, 0),
        ("Deployment", {}, {"f:paused": {}}, {}, 0),
        ("Deployment", {}, RESTART, {}, 0),
        ("Service", {"selector": {"a": "b", "foreign": "c"}}, {"f:selector": {}}, {}, 1),
        ("Service", {"selector": {"a": "b"}}, {"f:selector": {}}, {}, 0),
        ("Service", {}, PORT, {}, 1),
        ("Service", {}, {"f:ports": {'k:{"port":80,"protocol":"TCP"}': {"f:nodePort": {}}}}, {}, 0),
        ("Service", {}, {"f:loadBalancerSourceRanges": {}}, {}, 0),
        ("PodDisruptionBudget", {}, {"f:minAvailable": {}}, {}, 1),
        ("PersistentVolumeClaim", {}, {"f:resources": {"f:requests": {"f:storage": {}}}}, {}, 0),
    ],
)
def test_additions_to_parts_that_we_own_are_found(
    kind: str, spec: dict[str, Any], owned: dict[str, Any], entry: dict[str, Any], found: int
) -> None:
    container = {"name": "c", "image": "i"}
    ours = {
        "selector": {"a": "b"},
        "ports": [{"name": "http", "port": 80}],
        "template": {"spec": {"containers": [container]}},
    }
    desired = {"apiVersion": "v1", "kind": kind, "metadata": {"name": "x", "namespace": "n"}, "spec": ours}
    assert len(additions(desired, _edited(kind, {**ours, **spec}, owned, **entry))) == found
