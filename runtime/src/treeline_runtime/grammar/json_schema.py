"""What a JSON Schema says, in fewer words: the same for every backend (draft 2020-12).

`simplify` rewrites each schema that the root leads to. Annotations are dropped, keywords that say nothing too; a schema
gets the type that its keywords are about (`{"pattern": "^a"}` is a string); formats are patterns, and patterns are
written anew from what `re` reads in them; values of `enum` and `const` that are not of the type are left out; a `oneOf`
whose members share no value is an `anyOf`. What contradicts itself in one place is refused here.

Texts of the new schema are texts of the old one, not the other way round: where keywords of one type stand without
`type`, values of others would be allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from treeline_runtime.grammar.backend import GrammarError
from treeline_runtime.grammar.disjoint import disjoint, same, types_of
from treeline_runtime.grammar.formats import FORMATS
from treeline_runtime.grammar.patterns import as_regex, within
from treeline_runtime.grammar.schema_document import (
    Schema,
    UnsupportedError,
    resolve,
    resolved,
    unsatisfiable,
    within_schema,
)

IGNORED = frozenset(
    [
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        "$schema",
        "$anchor",
        "$vocabulary",
        "contentMediaType",
        "contentEncoding",
        "contentSchema",
        "discriminator",
        "externalDocs",
        "xml",
    ]
)
"""Annotations, of OpenAPI too. `x-…` as well."""
DEFINITIONS = frozenset(["$defs", "definitions"])
STRING = frozenset(["pattern", "format", "minLength", "maxLength"])
NUMBER = frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"])
ARRAY = frozenset(
    ["items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains", "minContains", "maxContains"]
)
OBJECT = frozenset(
    [
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
        "dependentRequired",
        "dependentSchemas",
    ]
)
APPLIED = frozenset(["$ref", "anyOf", "oneOf", "allOf", "not", "if", "then", "else"])
VALUES = frozenset(["const", "enum"])
_UNEVALUATED = {"unevaluatedProperties": "additionalProperties", "unevaluatedItems": "items"}
KNOWN = STRING | NUMBER | ARRAY | OBJECT | APPLIED | VALUES | {"type", *_UNEVALUATED}

_FAMILIES = {"string": STRING, "number": NUMBER, "array": ARRAY, "object": OBJECT}
TYPES = frozenset(["string", "number", "integer", "boolean", "null", "array", "object"])
_LARGEST = 2**53
"""Integers beyond are not the same in every library."""


def simplify(root: Schema | bool) -> list[tuple[str, Schema]]:
    """Rewrites `root` in place. Returns each schema that it leads to, with its path. Raises GrammarError."""
    found: list[tuple[str, Schema]] = []
    seen = set[int]()
    stack: list[tuple[str, Schema | bool]] = [("", root)]
    while stack:
        path, schema = stack.pop()
        if isinstance(schema, bool) or id(schema) in seen:
            continue
        seen.add(id(schema))
        _check_keywords(schema, path)
        _take_unevaluated(schema, path)
        found.append((path, schema))
        if "$ref" in schema:
            stack.append(resolve(root, schema["$ref"], path))
        stack += within_schema(schema, path)
    for _path, schema in found:  # before any of them gets a type, which allows less
        options = [resolved(option, root) for option in schema.get("oneOf", ())]
        if options and "anyOf" not in schema and disjoint(options):
            schema["anyOf"] = schema.pop("oneOf")
    for path, schema in found:
        _simplify_one(schema, path)
    _check_cycles(found, root)
    return found


def _check_cycles(schemas: list[tuple[str, Schema]], root: Schema | bool) -> None:
    """A value would be of a schema if it is of this schema: says nothing, and is looked up for ever."""
    inner = dict[int, set[int]]()
    for path, schema in schemas:
        same_value = [*schema.get("anyOf", ()), *schema.get("allOf", ()), *schema.get("oneOf", ())]
        if "$ref" in schema:
            same_value.append(resolve(root, schema["$ref"], path)[1])
        inner[id(schema)] = {id(other) for other in same_value if isinstance(other, dict)}
    waiting = schemas
    while waiting:
        still = [(path, schema) for path, schema in waiting if inner[id(schema)] & inner.keys()]
        if len(still) == len(waiting):
            path = min((path for path, _schema in still), key=len)
            raise GrammarError(f"the schema at {path or '/'} refers to itself for the same value")
        done = {id(schema) for _path, schema in waiting} - {id(schema) for _path, schema in still}
        for key in done:
            del inner[key]
        waiting = still


def _simplify_one(schema: Schema, path: str) -> None:
    _drop_what_says_nothing(schema)
    _type(schema, path)
    _limits(schema, path)
    _strings(schema, path)
    _numbers(schema, path)
    _values(schema, path)
    _properties(schema, path)


def _check_keywords(schema: Schema, path: str) -> None:
    for key in list(schema):
        if key in IGNORED or key.startswith("x-") or (key == "$id" and not path):
            del schema[key]
        elif key not in KNOWN and key not in DEFINITIONS:
            raise UnsupportedError(key, path)
        elif (shape := _SHAPES.get(key)) and not shape(schema[key]):
            raise GrammarError(f"{key!r} at {path or '/'} has not the form that it must have")


def _is_count(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 and value == int(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


_SHAPES: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(["minLength", "maxLength", "minItems", "maxItems", "minContains", "maxContains"], _is_count),
    **dict.fromkeys(["minProperties", "maxProperties"], _is_count),
    **dict.fromkeys(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"], _is_number),
    "multipleOf": lambda value: _is_number(value) and value > 0,
    **dict.fromkeys(["properties", "patternProperties", "dependentSchemas"], lambda value: isinstance(value, dict)),
    **dict.fromkeys(["anyOf", "oneOf", "allOf", "enum"], lambda value: isinstance(value, list) and bool(value)),
    "prefixItems": lambda value: isinstance(value, list),
    **dict.fromkeys(["pattern", "format"], lambda value: isinstance(value, str)),
    "required": _is_names,
    "uniqueItems": lambda value: isinstance(value, bool),
}


def _drop_what_says_nothing(schema: Schema) -> None:
    nothing: dict[str, list[Any]] = {
        **{key: [0] for key in ("minLength", "minItems", "minProperties")},
        "uniqueItems": [False],
        **{key: [[]] for key in ("required", "prefixItems")},
        **{key: [{}] for key in ("patternProperties", "dependentRequired", "dependentSchemas")},
        **{key: [True, {}] for key in ("propertyNames", "unevaluatedProperties", "unevaluatedItems")},
        "not": [False],
    }
    for key, values in nothing.items():
        if key in schema and any(schema[key] == value and type(schema[key]) is type(value) for value in values):
            del schema[key]
    if "if" not in schema or not {"then", "else"} & set(schema):
        for key in ("if", "then", "else"):
            schema.pop(key, None)
    if "contains" not in schema:
        for key in ("minContains", "maxContains"):
            schema.pop(key, None)


def _take_unevaluated(schema: Schema, path: str) -> None:
    """Without other schemas for the same value, what is not evaluated is what is additional."""
    for key, plain in _UNEVALUATED.items():
        if key in schema:
            if APPLIED & set(schema) or "contains" in schema:
                raise UnsupportedError(key, path)
            schema.setdefault(plain, schema.pop(key))
            schema.pop(key, None)


def _type(schema: Schema, path: str) -> None:
    if "type" not in schema:
        families = [name for name, keywords in _FAMILIES.items() if keywords & set(schema)]
        if families and not VALUES & set(schema):
            schema["type"] = families
    if "type" not in schema:
        return
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not types or not all(isinstance(name, str) and name in TYPES for name in types):
        raise GrammarError(f"'type' at {path or '/'} is one of {', '.join(sorted(TYPES))}, or a list of them")
    types = [name for name in dict.fromkeys(types) if name != "integer" or "number" not in types]
    schema["type"] = types[0] if len(types) == 1 else types


def _has_type(schema: Schema, *names: str) -> bool:
    types = schema.get("type", ())
    return bool(set(names) & set([types] if isinstance(types, str) else types))


def _limits(schema: Schema, path: str) -> None:
    for what, name in (("Length", "string"), ("Items", "array"), ("Properties", "object")):
        least, most = schema.get(f"min{what}", 0), schema.get(f"max{what}", math.inf)
        for key in (f"min{what}", f"max{what}"):
            if key in schema:
                schema[key] = int(schema[key])
        if least > most and schema.get("type") == name:
            raise unsatisfiable(path, f"'min{what}' is more than 'max{what}'")


def _strings(schema: Schema, path: str) -> None:
    if "format" in schema:
        name = schema.pop("format")
        if name not in FORMATS:
            raise UnsupportedError("format", path, f"is {name!r}; supported are {', '.join(FORMATS)}")
        if "pattern" in schema:
            schema.setdefault("allOf", []).append({"type": "string", "pattern": _canonical(FORMATS[name], path)})
        else:
            schema["pattern"] = FORMATS[name]
    if "pattern" in schema:
        schema["pattern"] = _canonical(schema["pattern"], f"{path}/pattern")
    if "patternProperties" in schema:
        patterns = schema["patternProperties"]
        schema["patternProperties"] = {_canonical(p, f"{path}/patternProperties"): patterns[p] for p in patterns}


def _canonical(pattern: str, path: str) -> str:
    try:
        return f"^(?:{as_regex(within(pattern))})$"
    except GrammarError as error:
        raise GrammarError(f"{error}: at {path}") from None


def _numbers(schema: Schema, path: str) -> None:
    if schema.get("type") == "integer":
        for key, rounded in (("minimum", math.ceil), ("exclusiveMinimum", math.floor)):
            if key in schema:
                schema[key] = rounded(schema[key])
        for key, rounded in (("maximum", math.floor), ("exclusiveMaximum", math.ceil)):
            if key in schema:
                schema[key] = rounded(schema[key])
    for key in NUMBER & set(schema):
        if isinstance(schema[key], int) and abs(schema[key]) > _LARGEST:
            raise UnsupportedError(key, path, "is more than 2^53")
        if isinstance(schema[key], float) and schema[key].is_integer() and abs(schema[key]) <= _LARGEST:
            schema[key] = int(schema[key])
    if not _has_type(schema, "number", "integer"):
        return
    low = max(schema.get("minimum", -math.inf), schema.get("exclusiveMinimum", -math.inf))
    high = min(schema.get("maximum", math.inf), schema.get("exclusiveMaximum", math.inf))
    open_ = low == schema.get("exclusiveMinimum") or high == schema.get("exclusiveMaximum")
    if isinstance(schema["type"], str) and (low > high or (low == high and open_)):
        raise unsatisfiable(path, "the bounds leave no number")


def _values(schema: Schema, path: str) -> None:
    """`const` and `enum` as one `enum`, of values that are of the type and, where simple, within the other keywords."""
    if not VALUES & set(schema):
        return
    values = schema.pop("enum", None)
    if "const" in schema:
        const = schema.pop("const")
        values = [const] if values is None or any(same(const, value) for value in values) else []
    types = schema.pop("type", None)
    names = {types} if isinstance(types, str) else set(types or TYPES)
    values = [value for value in values if types_of(value) & names]
    for family, keywords in _FAMILIES.items():
        if not any(family in types_of(value) for value in values):
            for key in keywords & set(schema):
                del schema[key]
    if not values:
        raise unsatisfiable(path, "no value of 'enum' or 'const' is of the type")
    if any(_is_large(value) for value in values):
        raise UnsupportedError("enum", path, "has an integer beyond 2^53")
    schema["enum"] = values


def _is_large(value: Any) -> bool:
    if isinstance(value, list | dict):
        return any(_is_large(inner) for inner in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and abs(value) > _LARGEST


def _properties(schema: Schema, path: str) -> None:
    """What is required has its place among the properties."""
    if not isinstance(schema.get("required"), list) or not _has_type(schema, "object"):
        return
    required = schema["required"] = list(dict.fromkeys(schema["required"]))
    missing = [name for name in required if name not in schema.get("properties", {})]
    others = schema.get("additionalProperties", True)
    if missing and "patternProperties" not in schema:
        if others is False:
            if schema["type"] == "object":
                raise unsatisfiable(path, f"{missing[0]!r} is required, but not allowed,")
            return
        schema["properties"] = {**schema.get("properties", {}), **dict.fromkeys(missing, others)}
    most = schema.get("maxProperties", math.inf)
    if len(required) > most and schema["type"] == "object":
        raise unsatisfiable(path, "more properties are required than 'maxProperties'")
