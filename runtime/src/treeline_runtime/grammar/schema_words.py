"""Keywords of JSON Schema: draft 2020-12, older drafts, OpenAPI 3.0; and those without effect.

By the standard, unknown keywords and formats are annotations. `ignored` lists them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from treeline_runtime.grammar.formats import FORMATS

ANNOTATIONS = frozenset(
    [
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
        *("$comment", "$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary"),
        *("contentMediaType", "contentEncoding", "contentSchema", "discriminator", "externalDocs", "xml"),
    ]
)
"""Including OpenAPI's, and `x-…`."""
DEFINITIONS = frozenset(["$defs", "definitions"])
STRING = frozenset(["pattern", "format", "minLength", "maxLength"])
NUMBER = frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"])
ARRAY = frozenset(
    ["items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains", "minContains", "maxContains"]
)
OBJECT = frozenset(
    [
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas"),
    ]
)
APPLIED = frozenset(["$ref", "anyOf", "oneOf", "allOf", "not", "if", "then", "else"])
VALUES = frozenset(["const", "enum"])
UNEVALUATED = {"unevaluatedProperties": "additionalProperties", "unevaluatedItems": "items"}
DYNAMIC = frozenset(["$dynamicRef", "$recursiveRef"])
NOBODYS = frozenset(
    [
        *("oneOf", "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "propertyNames"),
        *("contains", "minContains", "maxContains", "uniqueItems"),
    ]
)
"""Unsupported by both libraries; `exclusion` rewrites some before."""
OLDER = frozenset(["additionalItems", "dependencies", "nullable"])
"""Keywords of older drafts and OpenAPI 3.0, which `json_schema` rewrites."""
KNOWN = STRING | NUMBER | ARRAY | OBJECT | APPLIED | VALUES | UNEVALUATED.keys() | DYNAMIC | OLDER | {"type"}

BOUNDS = {"int32": (-(1 << 31), (1 << 31) - 1), "int64": (-(1 << 63) + 1024, (1 << 63) - 1)}
"""Bounds of integer formats. The lowest one of 64 bits is more than llguidance 1.9.1 reads."""
_SILENT = frozenset([*BOUNDS, "float", "double"])

MAPS = ("properties", "patternProperties", "dependentSchemas", "dependencies")
LISTS = ("items", "prefixItems", "anyOf", "oneOf", "allOf")
SINGLE = ("items", "additionalItems", "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else")
"""Keywords with schemas by name, in a list, or single. `items` is a list in older drafts."""


def inner(schema: dict[str, Any], *more: str) -> Iterator[tuple[str, Any]]:
    """The subschemas of this schema with their places. more: other keywords with schemas by name."""
    for key in (*MAPS, *more):
        if isinstance(found := schema.get(key), dict):
            yield from ((f"{key}/{name}", one) for name, one in found.items() if not isinstance(one, list))
    for key in LISTS:
        if isinstance(found := schema.get(key), list):
            yield from ((f"{key}/{i}", one) for i, one in enumerate(found))
    for key in SINGLE:
        if key in schema and not isinstance(schema[key], list):
            yield key, schema[key]


def listed(types: Any) -> list[Any]:
    return types if isinstance(types, list) else [types]


def types(schema: dict[str, Any]) -> list[str]:
    return listed(schema.get("type", []))


def ignored(schema: Any) -> list[str]:
    """Keywords and formats without effect that may be intended, each once, for people."""
    found: dict[str, None] = {}
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, dict):
            continue
        for word in one:
            if word not in KNOWN and word not in DEFINITIONS and word not in ANNOTATIONS and not word.startswith("x-"):
                found[word] = None
        name = one.get("format")
        if isinstance(name, str) and name not in FORMATS and name not in _SILENT:
            found[f"format.{name}"] = None
        waiting += reversed([below for _, below in inner(one, *DEFINITIONS)])
    return list(found)


def types_of(value: Any) -> set[str]:
    """The types of a value; a whole number has two."""
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number", "integer"} if value.is_integer() else {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
        case _:
            return {"object"}


def same(a: Any, b: Any) -> bool:
    """Equality in JSON Schema: 1 equals 1.0, but not true."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)
