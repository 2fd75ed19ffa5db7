"""The generated schemas: committed as generated, structural, documented, in agreement with the types."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.api_specs import Chance
from treeline_epp.endpoints.adapters.registry import ADAPTERS
from treeline_operator.api.engine import EngineType
from treeline_operator.api.model import InferenceModel
from treeline_operator.api.pool import InferencePool
from treeline_operator.plan.engines import ENGINES
from treeline_tools import api_page, crds
from treeline_tools.__main__ import documents, main
from treeline_wire.paths import INFERENCE

ROOT = Path(__file__).parents[3]
POOL, MODEL = (crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"] for crd in (crds.pools(), crds.models()))
SCHEMAS = {InferencePool: POOL, InferenceModel: MODEL}


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from nodes(inner, f"{path}.{name}")
    for inner in ("items", "additionalProperties"):
        if inner in schema:
            yield from nodes(schema[inner], f"{path}[]")


def test_committed_files_equal_the_generated_ones():
    assert main(["--root", str(ROOT), "--check"]) == 0


def test_check_reports_differences(tmp_path, capsys):
    assert main(["--root", str(tmp_path)]) == 0
    assert {p.relative_to(tmp_path) for p in tmp_path.rglob("*.*")} == set(documents())
    (tmp_path / "docs/api.md").write_text("old")
    (tmp_path / "crds/inferencepools.yaml").unlink()
    assert main(["--root", str(tmp_path), "--check"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert sorted(line.split()[0] for line in said) == ["crds/inferencepools.yaml", "docs/api.md"]


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=lambda schema: schema["description"])
def test_every_field_is_structural_typed_and_explained(schema):
    allowed = {
        "type",
        "description",
        "default",
        "enum",
        "format",
        "pattern",
        "items",
        "properties",
        "required",
    }
    allowed |= {"minimum", "maximum", "exclusiveMinimum", "minLength", "maxLength", "minItems", "maxItems"}
    allowed |= {"maxProperties", "additionalProperties", "anyOf"}
    for path, node in nodes(schema):
        assert {key for key in node if not key.startswith("x-kubernetes-")} <= allowed, path
        quantity = node.get("x-kubernetes-int-or-string", False)
        assert quantity or "type" in node, path
        assert ("anyOf" in node) == quantity, path
        if node.get("type") == "array" and ".spec" in path:
            assert "maxItems" in node, f"{path}: rules over unbounded lists exceed the API server's budget"
        last = path.rsplit(".", 1)[-1]
        if path and "[]" not in last and not path.startswith((".metadata", ".spec.template.spec.")):
            assert node.get("description", "").endswith("."), path


def test_unknown_fields_are_kept_in_foreign_fragments_only():
    kept = [path for path, node in nodes(POOL) if node.get("x-kubernetes-preserve-unknown-fields")]
    inner = ("", *(f".{name}[]" for name in ("containers", "initContainers", "volumes")))
    assert kept == [
        *(
            f".spec.{pods}template.spec{name}"
            for pods in ("", "prefill.", "endpointPicker.", "gateway.standalone.")
            for name in inner
        ),
    ]


def test_every_part_knows_each_engine_type():
    """An engine type without an adapter in the picker, as custom, may have any field."""
    types = set(get_args(EngineType))
    assert set(ENGINES) == set(INFERENCE) == types
    assert set(ADAPTERS) - {"openai"} == types - {"custom"}


def as_json_schema(node: Any) -> Any:
    """Convert a structural schema to JSON Schema that refuses unknown fields."""
    if isinstance(node, list):
        return [as_json_schema(inner) for inner in node]
    if not isinstance(node, dict):
        return node
    schema = {key: as_json_schema(value) for key, value in node.items()}
    if isinstance(node.get("exclusiveMinimum"), bool):
        schema["exclusiveMinimum"] = schema.pop("minimum")
    if (
        "properties" in node
        and isinstance(node["properties"], dict)
        and "x-kubernetes-preserve-unknown-fields" not in node
    ):
        schema["additionalProperties"] = False
    return schema


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(list(SCHEMAS)))
def test_accepted_objects_fit_the_schema(seed, kind):
    spec = Chance(seed).spec(kind.__name__)
    obj = {
        "apiVersion": "treeline.dev/v1alpha1",
        "kind": kind.__name__,
        "metadata": {"name": "x"},
        "spec": spec,
    }
    typed = kind.from_object(obj, strict=True)
    validator = jsonschema.Draft202012Validator(as_json_schema(SCHEMAS[kind]))
    assert [error.message for error in validator.iter_errors(obj)] == []
    written = typed.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert [error.message for error in validator.iter_errors({**obj, "spec": written})] == []
    assert kind.from_object({**obj, "spec": written}).spec == typed.spec


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_objects_refused_by_the_schema_are_refused_by_our_types(seed, data):
    spec = Chance(seed).spec("InferencePool")
    obj = {
        "apiVersion": "treeline.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": "x"},
        "spec": spec,
    }
    leaves = list(_leaves(spec))
    holder, key = data.draw(st.sampled_from(leaves))
    holder[key] = data.draw(st.sampled_from([-7, 1 << 40, "", " ", "NO WAY", None, [], {"no": "way"}, True]))
    refused = not jsonschema.Draft202012Validator(as_json_schema(POOL)).is_valid(obj)
    if refused and holder[key] is not None:
        # An explicit null is dropped by the API server before it looks; our types take it as left out, too.
        with pytest.raises(ValueError, match="validation error"):
            InferencePool.from_object(obj, strict=True)


def _leaves(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the paths of plain values, except within fragments of other APIs, which are not judged."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        if key in ("template", "metrics", "triggers"):
            continue
        if isinstance(inner, dict | list):
            yield from _leaves(inner)
        else:
            yield value, key


# The page and the chart


def rows_of(table: str) -> dict[str, str]:
    return {line.split("`")[1]: line for line in table.splitlines() if line.startswith("| `")}


def is_listed(field: str, rows: dict[str, str]) -> bool:
    """Return whether a reader finds the field: in a row of its own, or by the row of an object around it."""
    if field in rows:
        return True
    around, _, name = field.rpartition(".")
    while around and around.removesuffix("[]") not in rows:
        around, _, before = around.rpartition(".")
        name = f"{before}.{name}"
    row = rows.get(around.removesuffix("[]"), "")
    if "object with `name`" in row:
        return name == "name" or (name == "key" and "and `key`" in row)
    same = re.search(r"Fields: as in `(.+)`\.", row)
    return same is not None and is_listed(f"{same[1]}.{name}", rows)


def test_the_page_has_every_field_and_every_rule():
    page = api_page.page()
    for schema, section in zip(SCHEMAS.values(), re.split("^## ", page, flags=re.MULTILINE)[1:], strict=False):
        spec, _, status = re.split("### (?:Rules|status)", section)
        tables = {".spec.": rows_of(spec), ".status.": rows_of(status)}
        for path, node in nodes(schema):
            for part, rows in tables.items():
                if path.startswith(part) and not path.endswith("[]"):
                    assert is_listed(path.removeprefix(part), rows), path
            for rule in node.get("x-kubernetes-validations", ()):
                setting = re.match(r"(\w+) is a setting of ", rule["message"])
                parameter = re.match(r"(\w+) is a parameter of (\w+)", rule["message"])
                if setting:
                    assert f"| `{setting[1]}` | " in page.split("## Settings of engines")[1]
                elif parameter:
                    row = next(line for line in page.splitlines() if f".{parameter[1]}` |" in line)
                    assert f"| {parameter[2]}" in row
                else:
                    cause, _, fix = rule["message"].rpartition(": ")
                    assert (cause or fix) in page
    for line in page.splitlines():
        if line.startswith("|"):
            assert line.replace("\\|", "").count("|") in (3, 4, 5, 6), line


@pytest.mark.parametrize(
    ("field", "listed"),
    [
        ("a.size", True),
        ("b.size", True),
        ("b.none", False),
        ("c.name", True),
        ("c.key", False),
        ("d", False),
        ("e[].size", True),
        ("f.key", True),
        ("f.none", False),
    ],
)
def test_a_field_without_a_row_is_found_missing(field, listed):
    rows = {"a": "| `a` |", "a.size": "| `a.size` |", "b": "| `b` | Fields: as in `a`. |"}
    rows |= {"c": "| `c` | object with `name` |", "e": "| `e` | Fields: as in `a`. |"}
    rows |= {"f": "| `f` | object with `name` and `key` (`token`) |"}
    assert is_listed(field, rows) is listed


def test_texts_contain_no_chart_templates():
    crd = crds.pools()
    crd["spec"]["names"]["kind"] = "{{ oops }}"
    with pytest.raises(ValueError, match="taken for a template"):
        crds.chart_template(crd)
