"""From our models to structural OpenAPI v3 schemas, as CustomResourceDefinitions want them."""

from __future__ import annotations

import inspect
from typing import Any, Final

from treeline_operator.api.parts import Resource
from treeline_operator.api.rules import KEYWORD

Schema = dict[str, Any]

_ROOT: Final[Schema] = {
    "apiVersion": {
        "type": "string",
        "description": "Group and version of the object: `treeline.dev/v1alpha1`.",
    },
    "kind": {"type": "string", "description": "Kind of the object."},
    "metadata": {"type": "object", "properties": {"name": {"type": "string"}}},
}


def structural(kind: type[Resource]) -> Schema:
    """The schema of a kind: references inlined, defaults and rules in it."""
    raw = kind.model_json_schema(by_alias=True)
    definitions = raw.get("$defs", {})
    schema = _converted(raw, definitions)
    spec = _with_defaults(schema["properties"]["spec"])
    status = schema["properties"]["status"]
    return {
        "type": "object",
        "description": schema["description"],
        "required": ["spec"],
        "properties": {**_ROOT, "spec": spec, "status": status},
        **{key: value for key, value in schema.items() if key.startswith("x-kubernetes-")},
    }


def _converted(node: Schema, definitions: Schema) -> Schema:
    """A JSON schema as pydantic writes it, as a structural one. What stands beside a reference wins over its target."""
    node = _without_null(node)
    if "$ref" in node:
        beside = {key: value for key, value in node.items() if key != "$ref"}
        return _converted({**definitions[node["$ref"].rsplit("/", 1)[1]], **beside}, definitions)
    dropped = {"title", "$defs"} | ({"default"} if node.get("default") in (None, []) else set())
    kept = {key: value for key, value in node.items() if key not in dropped}
    if kept.get("additionalProperties") is False:
        del kept["additionalProperties"]
    if "const" in kept:
        kept["enum"] = [kept.pop("const")]
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if exclusive in kept:
            kept |= {bound: kept[exclusive], exclusive: True}
    if "description" in kept:
        kept["description"] = " ".join(inspect.cleandoc(kept["description"]).split())
    if "properties" in kept:
        kept["properties"] = {n: _converted(p, definitions) for n, p in kept["properties"].items()}
    for inner in ("items", "additionalProperties"):
        if inner in kept:
            kept[inner] = _converted(kept[inner], definitions)
    return _ordered(kept)


_FIRST: Final = ("type", "description", "default", "enum")
_LAST: Final = ("required", "properties", "additionalProperties", "items", KEYWORD)


def _ordered(node: Schema) -> Schema:
    return {key: node[key] for key in sorted(node, key=_place)}


def _place(key: str) -> tuple[int, int, str]:
    """A sort key for people: type and description, then bounds, then contents, then rules."""
    if key in _FIRST:
        return 0, _FIRST.index(key), ""
    return (2, _LAST.index(key), "") if key in _LAST else (1, 0, key)


def _without_null(node: Schema) -> Schema:
    """Removes null from an optional field: in Kubernetes it is left out, never null."""
    choices = [choice for choice in node.get("anyOf", ()) if choice.get("type") != "null"]
    if len(choices) != 1:
        return node
    beside = {key: value for key, value in node.items() if key != "anyOf"}
    return {**choices[0], **beside, "x-optional": True}


def _with_defaults(node: Schema) -> Schema:
    """Give every field that is a part, and not optional, the default that its own fields add up to.

    It cannot be just `{}`: the API server holds a default to the rules before it fills in the fields' own.
    """
    result = {key: value for key, value in node.items() if key != "x-optional"}
    for inner in ("items", "additionalProperties"):
        if inner in result:
            result[inner] = _with_defaults(result[inner])
    if "properties" in result:
        result["properties"] = {name: _with_default(field) for name, field in result["properties"].items()}
    return result


def _with_default(field: Schema) -> Schema:
    result = _with_defaults(field)
    if "properties" in field and "x-optional" not in field and "required" not in field:
        inner = result["properties"].items()
        default = {name: schema["default"] for name, schema in inner if "default" in schema}
        return _ordered({**result, "default": default}) if default else result
    return result
