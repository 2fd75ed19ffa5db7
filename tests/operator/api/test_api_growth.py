"""Within a version of the API the definitions only grow: each way to take something away is told, and is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from treeline_operator.api import crds
from treeline_operator.api.__main__ import RELEASED, definitions, main
from treeline_operator.api.growth import retreat, shrinkage

POOL = crds.pools()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]

Change = Callable[[dict[str, Any]], object]


def spec_of(schema: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = schema["properties"]["spec"]["properties"]
    return fields


SHRINKING: dict[str, Change] = {
    ".spec.drain: is gone": lambda s: spec_of(s).pop("drain"),
    ".spec.replicas: type was 'integer' and is 'string'": lambda s: spec_of(s)["replicas"].update(
        type="string"
    ),
    ".spec.replicas: maximum was 1000 and is 10": lambda s: spec_of(s)["replicas"].update(maximum=10),
    ".spec.replicas: minimum was 0 and is 1": lambda s: spec_of(s)["replicas"].update(minimum=1),
    ".spec.replicas: default was 1 and is 2": lambda s: spec_of(s)["replicas"].update(default=2),
    ".spec.engine: is required now": lambda s: s["properties"]["spec"]["required"].append("engine"),
    ".spec.engine.type: the value 'vllm' is gone": lambda s: spec_of(s)["engine"]["properties"]["type"][
        "enum"
    ].remove("vllm"),
    ".spec.engine.dtype: only some values are allowed now": lambda s: spec_of(s)["engine"]["properties"][
        "dtype"
    ].update(enum=["auto"]),
    ".spec.roles: x-kubernetes-list-type was 'map' and is 'set'": lambda s: spec_of(s)["roles"].update(
        {"x-kubernetes-list-type": "set"}
    ),
    ".spec.roles: maxItems was 3 and is 2": lambda s: spec_of(s)["roles"].update(maxItems=2),
    ".spec.roles[].name: the value 'both' is gone": lambda s: spec_of(s)["roles"]["items"]["properties"][
        "name"
    ]["enum"].remove("both"),
    ".spec.model: has a new rule: be nice": lambda s: spec_of(s)["model"]["x-kubernetes-validations"].append(
        {"rule": "false", "message": "be nice"}
    ),
    ".spec.template.spec: unknown fields are not kept any more": lambda s: spec_of(s)["template"][
        "properties"
    ]["spec"].pop("x-kubernetes-preserve-unknown-fields"),
    ".spec.template.spec.hostname: was free and has a form now": lambda s: spec_of(s)["template"][
        "properties"
    ]["spec"]["properties"].update(hostname={"type": "string"}),
    ".spec.engine.dtype: pattern was '^[a-z0-9_]+$' and is '^[a-z]+$'": lambda s: spec_of(s)["engine"][
        "properties"
    ]["dtype"].update(pattern="^[a-z]+$"),
    ".spec.engine.dtype: format was None and is 'date'": lambda s: spec_of(s)["engine"]["properties"][
        "dtype"
    ].update(format="date"),
    ".spec.roles: x-kubernetes-list-map-keys was ['name'] and is ['replicas']": lambda s: spec_of(s)[
        "roles"
    ].update({"x-kubernetes-list-map-keys": ["replicas"]}),
    ".spec.replicas: exclusiveMinimum was None and is True": lambda s: spec_of(s)["replicas"].update(
        exclusiveMinimum=True
    ),
    ".spec.replicas: multipleOf was None and is 2": lambda s: spec_of(s)["replicas"].update(multipleOf=2),
    ".spec.drain: default was {'timeoutSeconds': 60} and is None": lambda s: spec_of(s)["drain"].pop(
        "default"
    ),
    ".status.conditions: is gone": lambda s: s["properties"]["status"]["properties"].pop("conditions"),
    ".spec.gateway.standalone.annotations{}: maxLength was 1024 and is 9": lambda s: spec_of(s)["gateway"][
        "properties"
    ]["standalone"]["properties"]["annotations"]["additionalProperties"].update(maxLength=9),
}
GROWING: dict[str, Change] = {
    "a field": lambda s: spec_of(s).update(extra={"type": "string"}),
    "a default of a new field": lambda s: (
        spec_of(s)["drain"]["properties"].update(mode={"type": "string", "default": "x"}),
        spec_of(s)["drain"]["default"].update(mode="x"),
    ),
    "a value": lambda s: spec_of(s)["engine"]["properties"]["type"]["enum"].append("other"),
    "a wider bound": lambda s: spec_of(s)["replicas"].update(maximum=5000),
    "no bound": lambda s: spec_of(s)["replicas"].pop("maximum"),
    "any value": lambda s: spec_of(s)["engine"]["properties"]["type"].pop("enum"),
    "no pattern": lambda s: spec_of(s)["engine"]["properties"]["dtype"].pop("pattern"),
    "a rule less": lambda s: spec_of(s)["engine"]["x-kubernetes-validations"].pop(),
    "an optional field": lambda s: s["properties"]["spec"]["required"].clear(),
    "other words": lambda s: spec_of(s)["drain"].update(description="How pods end."),
}


@pytest.mark.parametrize("told", SHRINKING)
def test_a_schema_that_shrinks_is_told(told):
    changed = copy.deepcopy(POOL)
    SHRINKING[told](changed)
    assert list(shrinkage(POOL, changed)) == [told]


@pytest.mark.parametrize("what", GROWING)
def test_a_schema_may_grow(what):
    changed = copy.deepcopy(POOL)
    GROWING[what](changed)
    assert changed != POOL
    assert list(shrinkage(POOL, changed)) == []


def nodes(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield schema
    for inner in schema.get("properties", {}).values():
        yield from nodes(inner)
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from nodes(schema[key])


NARROWER: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "type": lambda n: {**n, "type": "null"},
    "enum": lambda n: {**n, "enum": n["enum"][1:]} if "enum" in n else {**n, "enum": ["x"]},
    "default": lambda n: {**n, "default": "another"},
    "fields": lambda n: (
        {**n, "properties": dict(list(n["properties"].items())[1:])} if n.get("properties") else n
    ),
    "required": lambda n: {**n, "required": [*n.get("required", ()), "a field"]},
    "maximum": lambda n: {**n, "maximum": n.get("maximum", 1000) - 1},
    "minLength": lambda n: {**n, "minLength": n.get("minLength", 0) + 1},
    "maxItems": lambda n: {**n, "maxItems": n.get("maxItems", 1000) - 1},
    "pattern": lambda n: {**n, "pattern": "^never$"},
    "rule": lambda n: {**n, "x-kubernetes-validations": [{"rule": "false", "message": "no"}]},
    "keyword": lambda n: {**n, "x-kubernetes-embedded-resource": True},
}


@pytest.mark.parametrize("how", NARROWER)
def test_a_node_that_becomes_narrower_is_told_wherever_it_is(how: str) -> None:
    changed = copy.deepcopy(POOL)
    count = 0
    for node in nodes(changed):
        before, after = dict(node), NARROWER[how](node)
        if after == before:
            continue
        node.clear()
        node.update(after)
        assert list(shrinkage(POOL, changed)), f"{how} of {before.get('description')}"
        node.clear()
        node.update(before)
        count += 1
    assert count > 20
    assert changed == POOL


LOSSES: dict[str, Change] = {
    ": scope was 'Namespaced' and is 'Cluster'": lambda d: d.update(scope="Cluster"),
    ": kind was 'InferencePool' and is 'Pool'": lambda d: d["names"].update(kind="Pool"),
    ": shortNames lacks 'tlpool' now": lambda d: d["names"].update(shortNames=["pool"]),
    ": categories lacks 'treeline' now": lambda d: d["names"].pop("categories"),
    ": subresource status was {} and is None": lambda d: d["subresources"].pop("status"),
    ": the kind is gone": lambda d: d.clear(),
}


@pytest.mark.parametrize("told", LOSSES)
def test_a_definition_that_takes_something_away_is_told(told: str) -> None:
    before = definitions()["inferencepools"]
    changed = copy.deepcopy(before)
    LOSSES[told](changed)
    assert list(retreat(before, changed)) == [told]


def test_a_definition_may_grow() -> None:
    before = definitions()["inferencemodels"]
    changed = copy.deepcopy(before)
    changed["names"]["shortNames"].append("another")
    changed["subresources"]["scale"] = {"specReplicasPath": ".spec.replicas"}
    assert list(retreat(before, changed)) == []


def test_the_check_fails_where_something_released_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in ((), ("--release",)):
        assert main(["--root", str(tmp_path), *arguments]) == 0
    released = json.loads((tmp_path / RELEASED).read_text())
    fields = spec_of(released["inferencepools"]["schema"])
    fields["formerly"] = {"type": "string"}
    fields["replicas"]["maximum"] = 5000
    released["inferencethings"] = released["inferencemodels"]
    (tmp_path / RELEASED).write_text(json.dumps(released))
    assert main(["--root", str(tmp_path), "--check"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "inferencepools.spec.replicas: maximum was 5000 and is 1000; v1alpha1 only grows",
        "inferencepools.spec.formerly: is gone; v1alpha1 only grows",
        "inferencethings: the kind is gone; v1alpha1 only grows",
    ]
