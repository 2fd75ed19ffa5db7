"""The words of JSON Schema: of draft 2020-12, of older drafts, of OpenAPI 3.0; and which of a schema say nothing.

The standard has it that words and formats which are not known are annotations. They are, and `ignored` names them.
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
"""Of OpenAPI too. `x-…` as well."""
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
"""No library has these; some are said in others before (`exclusion`)."""
OLDER = frozenset(["additionalItems", "dependencies", "nullable"])
"""Of older drafts and of OpenAPI 3.0; `json_schema` says them in others."""
KNOWN = STRING | NUMBER | ARRAY | OBJECT | APPLIED | VALUES | UNEVALUATED.keys() | DYNAMIC | OLDER | {"type"}

BOUNDS = {"int32": (-(1 << 31), (1 << 31) - 1), "int64": (-(1 << 63) + 1024, (1 << 63) - 1)}
"""Of formats of integers. The least one of 64 bits is more than llguidance 1.9.1 reads."""
_SILENT = frozenset([*BOUNDS, "float", "double"])

MAPS = ("properties", "patternProperties", "dependentSchemas", "dependencies")
LISTS = ("items", "prefixItems", "anyOf", "oneOf", "allOf")
SINGLE = ("items", "additionalItems", "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else")
"""Words with schemas in them: by name, in a list, and one. `items` is a list in older drafts."""


def inner(schema: dict[str, Any], *more: str) -> Iterator[tuple[str, Any]]:
    """What stands where a schema should directly inside of this one, with its place. more: other words with schemas by
    name."""
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
    """The value of `type`, which is a name or a list of names."""
    return types if isinstance(types, list) else [types]


def types(schema: dict[str, Any]) -> list[str]:
    """That a schema names."""
    return listed(schema.get("type", []))


def is_annotation(word: str) -> bool:
    return word in ANNOTATIONS or word.startswith("x-")


def ignored(schema: Any) -> list[str]:
    """Words and formats of a schema that say nothing here and may be meant to, each once, as a person reads it."""
    found: dict[str, None] = {}
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, dict):
            continue
        for word in one:
            if word not in KNOWN and word not in DEFINITIONS and not is_annotation(word):
                found[word] = None
        name = one.get("format")
        if isinstance(name, str) and name not in FORMATS and name not in _SILENT:
            found[f"format.{name}"] = None
        waiting += reversed([below for _, below in inner(one, *DEFINITIONS)])
    return list(found)


def types_of(value: Any) -> set[str]:
    """Of a value; a whole number is of two."""
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
    """Equal as JSON Schema means it: 1 is 1.0, but true is not 1."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)
