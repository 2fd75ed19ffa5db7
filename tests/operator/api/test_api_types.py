"""The typed kinds: their parsing, their helpers, and the words of the status."""

from __future__ import annotations

import json
from decimal import Decimal

import pytest
from pydantic import ValidationError
from support.api_specs import document
from treeline_operator.api.model import InferenceModel
from treeline_operator.api.pool import InferencePool
from treeline_operator.api.rules import violations
from treeline_operator.api.source import Source
from treeline_operator.quantity import quantity


def pool(text: str) -> InferencePool:
    return InferencePool.from_object(document("InferencePool", text))


@pytest.mark.parametrize("text", ["5%\n", "5%%", " 5%", "5", "101%", "05%", "\u0665%"])
@pytest.mark.parametrize("field", ["rollout: {maxSurge: %s}", "disruptionBudget: {maxUnavailable: %s}"])
def test_invalid_percentages_are_refused_without_an_api_server(field, text):
    with pytest.raises(ValidationError, match="is no percentage"):
        pool(field % json.dumps(text))


def test_an_object_of_a_newer_version_is_read_and_a_misspelt_file_is_refused():
    obj = document("InferencePool", "{engine: {warp: 9}, model: {shards: [1]}, accelerator: {spin: left}}")
    obj["metadata"] |= {"managedFields": [], "creationTimestamp": "2026-11-01T10:00:00Z", "uid": "u"}
    obj["status"] = {"replicas": 1, "mood": "good"}
    read = InferencePool.from_object(obj)
    assert read.metadata.creation_timestamp is not None
    assert read.metadata.creation_timestamp.isoformat() == "2026-11-01T10:00:00+00:00"
    assert read.status == {"replicas": 1}
    with pytest.raises(ValidationError, match=r"engine\.warp"):
        InferencePool.from_object(obj, strict=True)


def test_unreadable_answers_are_errors():
    for text in ("model: {uri: az://bucket/x}", "engine: {type: other}", "accelerator: {type: tpu}"):
        with pytest.raises(ValidationError):
            pool(text)


def test_specs_cannot_be_changed_by_accident():
    read = pool("")
    with pytest.raises(ValidationError, match="frozen"):
        read.spec.replicas = 3


@pytest.mark.parametrize(
    ("uri", "source", "name"),
    [
        ("hf://org/name", Source("hf", "org/name"), "name"),
        ("hf://org/name@v1", Source("hf", "org/name", revision="v1"), "name"),
        ("pvc://claim/a/b", Source("pvc", "claim", "a/b"), "b"),
        ("pvc://claim", Source("pvc", "claim"), "claim"),
        ("s3://bucket/a/b", Source("s3", "bucket", "a/b"), "b"),
        ("gs://bucket", Source("gs", "bucket"), "bucket"),
        ("oci://r.io:5000/org/name:v1", Source("oci", "r.io:5000/org/name:v1"), "name"),
        ("oci://r.io/org/name:v1/a/b", Source("oci", "r.io/org/name:v1", "a/b"), "b"),
        (
            f"oci://r.io/name@sha256:{'0' * 64}",
            Source("oci", f"r.io/name@sha256:{'0' * 64}"),
            "name",
        ),
        ("path:///models/x", Source("path", "/models/x"), "x"),
        ("builtin://tiny", Source("builtin", "tiny"), "tiny"),
    ],
)
def test_uris_are_parsed_and_name_the_model(uri, source, name):
    model = pool(f"model: {{uri: '{uri}'}}").spec.model
    assert model.source == source
    assert model.served_name == name
    assert pool(f"model: {{uri: '{uri}', name: mine}}").spec.model.served_name == "mine"


def test_an_invalid_uri_is_refused():
    for uri in ("tiny", "hf://", "ftp://x"):
        with pytest.raises(ValueError, match="is no model URI"):
            Source.parse(uri)


def test_the_gateway_of_a_pool_is_ours_unless_it_names_parents():
    ours, theirs = pool("").spec.gateway, pool("gateway: {parentRefs: [{name: g}]}").spec.gateway
    assert (ours.mode, theirs.mode) == ("standalone", "gateway-api")
    assert (ours.edge.port, ours.edge.service_type) == (80, "ClusterIP")


def test_owner_references_mark_objects_deleted_with_the_owner():
    obj = document("InferencePool", "")
    obj["metadata"]["uid"] = "u"
    read = InferencePool.from_object(obj)
    plain = {"apiVersion": "treeline.dev/v1alpha1", "kind": "InferencePool", "name": "tiny", "uid": "u"}
    assert read.owner_reference(controller=False) == plain
    assert read.owner_reference(controller=True) == plain | {"controller": True, "blockOwnerDeletion": True}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("200m", "0.2"),
        ("0.2", "0.2"),
        ("4Gi", str(4 * 2**30)),
        ("1k", "1000"),
        ("1e3", "1000"),
        ("1E3", "1000"),
        ("1E", "1e18"),
        ("+5", "5"),
        (".5", "0.5"),
        ("7n", "7e-9"),
        ("3u", "3e-6"),
    ],
)
def test_quantities_have_the_values_that_kubernetes_gives_them(text, value):
    assert quantity(text) == Decimal(value)


def test_invalid_quantities_are_refused():
    for text in ("", "big", "1 Gi", "1Ki2", "1kk", "\u0665"):
        assert quantity(text) is None
        with pytest.raises(ValidationError):
            pool(f"model: {{uri: hf://o/n, size: {json.dumps(text)}}}")
    with pytest.raises(ValidationError):
        pool("model: {uri: hf://o/n, size: '-1'}")


def test_broken_rules_are_reported_with_the_path_of_the_culprit():
    told = list(
        violations(pool("{accelerator: {count: 2, class: H100}, gateway: {parentRefs: [{name: a}, {name: a}]}}"))
    )
    assert [one.split(": ")[0] for one in told] == [
        "spec.accelerator.count",
        "spec.accelerator.class",
        "spec.gateway.parentRefs",
    ]
    model = InferenceModel.from_object(document("InferenceModel", "", "x" * 41))
    assert next(violations(model)).startswith("metadata.name: ")
