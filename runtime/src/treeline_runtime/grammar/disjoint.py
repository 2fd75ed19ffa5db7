"""Values and schemas that have nothing in common, as far as it shows."""

from __future__ import annotations

from typing import Any

from treeline_runtime.grammar.schema_words import listed

Schema = dict[str, Any]


def apart(a: Any, b: Any) -> bool:
    """Whether no value is of both schemas: by types, values, one property that both require, or one that one requires
    and the other has not."""
    if a is False or b is False:
        return True
    if not isinstance(a, dict) or not isinstance(b, dict):
        return False
    values_a, values_b = _finite(a), _finite(b)
    if values_a is not None and values_b is not None:
        return not any(same(x, y) for x in values_a for y in values_b)
    types_a, types_b = _types(a, values_a), _types(b, values_b)
    if types_a is not None and types_b is not None and not types_a & types_b:
        return True
    if a.get("type") != "object" or b.get("type") != "object":
        return False
    if _lacks(a, b) or _lacks(b, a):
        return True
    tags = set(a.get("required", ())) & set(b.get("required", ()))
    return any(apart(a.get("properties", {}).get(tag, True), b.get("properties", {}).get(tag, True)) for tag in tags)


def _lacks(a: Schema, b: Schema) -> bool:
    if a.get("additionalProperties") is not False or "patternProperties" in a:
        return False
    return not set(b.get("required", ())) <= a.get("properties", {}).keys()


def _finite(schema: Schema) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _types(schema: Schema, values: list[Any] | None) -> set[str] | None:
    if values is not None:
        return set().union(*(types_of(value) for value in values))
    types = schema.get("type")
    if types is None:
        return None
    names = {name for name in listed(types) if isinstance(name, str)}
    return names | {"number", "integer"} if names & {"number", "integer"} else names


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
