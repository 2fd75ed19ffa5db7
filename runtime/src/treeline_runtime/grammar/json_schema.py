"""Simplifies a JSON Schema for all backends (draft 2020-12).

`simplify` rewrites each schema below the root. Old keywords become today's, negative ones positive (`exclusion`);
annotations and keywords without effect are dropped; a schema gets the type of its keywords (`{"pattern": "^a"}` is a
string); formats become patterns, and patterns are rewritten; values of `enum` and `const` of other types are removed.
Contradictions within one schema, and unsupported keywords, are refused.

Texts of the new schema are texts of the old one, but not vice versa: keywords of one type without `type` would also
allow values of other types.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from treeline_runtime.grammar import schema_words
from treeline_runtime.grammar.backend import GrammarError
from treeline_runtime.grammar.exclusion import in_plain_words
from treeline_runtime.grammar.formats import FORMATS, REDUNDANT
from treeline_runtime.grammar.patterns import as_regex, within
from treeline_runtime.grammar.schema_document import Document, Schema, UnsupportedError, unsatisfiable
from treeline_runtime.grammar.schema_words import listed, same, types_of

_FAMILIES = {
    "string": schema_words.STRING,
    "number": schema_words.NUMBER,
    "array": schema_words.ARRAY,
    "object": schema_words.OBJECT,
}
TYPES = frozenset(["string", "number", "integer", "boolean", "null", "array", "object"])
_MOST_PROPERTIES = 300
"""The most properties that llguidance can process in one step."""
_LARGEST = 2**53
"""Larger integers differ between libraries."""


def for_llguidance(source: str) -> str:
    """The same schema as JSON for llguidance 1.9.1, which intersects schemas, and itself refuses a `oneOf` with
    overlapping members, contradicting schemas, a number without a value within bounds and multiples, and a pattern
    without a text of the length. Raises GrammarError."""
    document = Document(source)
    simplify(document)
    for path, schema in document.schemas:
        check_free_keys(schema, path)
        if len(schema.get("properties", ())) > _MOST_PROPERTIES:
            raise UnsupportedError("properties", path, f"with more than {_MOST_PROPERTIES} is not supported")
    _check_near_bounds(document)
    return document.written()


def simplify(document: Document) -> None:
    """Simplifies the document's schemas in place. Raises GrammarError."""
    for path, schema in document.schemas:
        _check_type(schema, path)
        in_todays_words(schema, path, document.is_draft_4)
        _check_keywords(schema, path)
        _drop_what_says_nothing(schema)
        _apart_from_format(schema)
        _take_unevaluated(schema, path, document.is_before_2019)
    document.find()
    in_plain_words(document)  # before any of them gets a type, which allows less
    document.find()
    for path, schema in document.schemas:
        for key in schema:
            if key in schema_words.NOBODYS:
                raise UnsupportedError(key, path)
    for path, schema in document.schemas:
        _format(schema)
        _type(schema)
        _limits(schema, path)
        _strings(schema, path)
        _numbers(schema, path)
        _values(schema, path)
        _properties(schema, path)
    _check_cycles(document)
    _check_finite(document)


def _check_cycles(document: Document) -> None:
    """Refuses a schema that refers only to itself: undefined by the standard, endless in validators."""
    known = {id(schema) for _path, schema in document.schemas}

    def is_clear(schema: Schema, clear: set[int]) -> bool:
        same_value = [*schema.get("anyOf", ()), *schema.get("allOf", ()), *schema.get("oneOf", ())]
        if "$ref" in schema:
            same_value.append(document.target(schema))
        return not {id(other) for other in same_value} & known - clear

    if (path := _without_end(document, is_clear)) is not None:
        raise GrammarError(f"the schema at {path or '/'} refers to itself for the same value")


def _check_finite(document: Document) -> None:
    """Refuses a schema whose values would contain themselves without end."""

    def has_value(schema: Schema, finite: set[int]) -> bool:
        def known(one: Any) -> bool:
            return one is True or id(one) in finite

        if "enum" in schema:
            return True
        needed = [*schema.get("allOf", ()), *([document.target(schema)] if "$ref" in schema else ())]
        options = [schema[word] for word in ("anyOf", "oneOf") if word in schema]
        if not all(map(known, needed)) or not all(any(map(known, one)) for one in options):
            return False
        names, least = schema.get("properties", {}), schema.get("minItems", 0)
        prefix, others = schema.get("prefixItems", [])[:least], [schema.get("items", True)]
        held = {
            "object": [names[name] for name in schema.get("required", ()) if name in names],
            "array": prefix + (others if least > len(prefix) else []),
        }
        return any(all(map(known, held.get(name, ()))) for name in listed(schema.get("type", "null")))

    if (path := _without_end(document, has_value)) is not None:
        raise unsatisfiable(path, "each value would have to hold another one of its kind:")


def _without_end(document: Document, is_done: Callable[[Schema, set[int]], bool]) -> str | None:
    """The path of a schema that never gets done. is_done: whether a schema is, given the ids of those that are."""
    waiting, done = document.schemas, set[int]()
    while waiting:
        still = [(path, schema) for path, schema in waiting if not is_done(schema, done)]
        if len(still) == len(waiting):
            return min((path for path, _schema in still), key=len)
        done = {id(schema) for _path, schema in document.schemas} - {id(schema) for _path, schema in still}
        waiting = still
    return None


def _check_type(schema: Schema, path: str) -> None:
    types = listed(schema.get("type", "null"))
    if not types or not all(isinstance(name, str) and name in TYPES for name in types):
        raise GrammarError(f"'type' at {path or '/'} is one of {', '.join(sorted(TYPES))}, or a list of them")


def _check_keywords(schema: Schema, path: str) -> None:
    for key in list(schema):
        if key in schema_words.DEFINITIONS:
            continue
        if key in schema_words.DYNAMIC:
            raise UnsupportedError(key, path)
        if key not in schema_words.KNOWN:
            del schema[key]
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
    "dependentRequired": lambda value: isinstance(value, dict) and all(map(_is_names, value.values())),
    "dependencies": lambda value: isinstance(value, dict),
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
    if schema.get("minProperties", 0) <= len(set(schema.get("required", ()))):
        schema.pop("minProperties", None)
    if schema.get("maxItems", math.inf) <= 1:
        schema.pop("uniqueItems", None)
    if "if" not in schema or not {"then", "else"} & set(schema):
        for key in ("if", "then", "else"):
            schema.pop(key, None)
    if "contains" not in schema:
        for key in ("minContains", "maxContains"):
            schema.pop(key, None)


def _apart_from_format(schema: Schema) -> None:
    """A pattern beside a format becomes a schema of its own."""
    name = schema.get("format")
    if "pattern" in schema and name in FORMATS:
        pattern = schema.pop("pattern")
        if pattern != REDUNDANT.get(name):
            schema["allOf"] = [*schema.get("allOf", ()), {"pattern": pattern}]


def _take_unevaluated(schema: Schema, path: str, is_before_2019: bool) -> None:
    """Without other schemas for the value, `unevaluated…` equals `additional…`; older drafts lack it."""
    for key, plain in schema_words.UNEVALUATED.items():
        if is_before_2019:
            schema.pop(key, None)
        elif key in schema:
            if schema_words.APPLIED & set(schema) or "contains" in schema:
                raise UnsupportedError(key, path)
            schema.setdefault(plain, schema.pop(key))
            schema.pop(key, None)


def _type(schema: Schema) -> None:
    if "type" not in schema:
        families = [name for name, keywords in _FAMILIES.items() if keywords & set(schema)]
        if families and not schema_words.VALUES & set(schema):
            schema["type"] = families
    if "type" not in schema:
        return
    types = listed(schema["type"])
    types = [name for name in dict.fromkeys(types) if name != "integer" or "number" not in types]
    schema["type"] = types[0] if len(types) == 1 else types


def _has_type(schema: Schema, *names: str) -> bool:
    types = schema.get("type", ())
    return bool(set(names) & set([types] if isinstance(types, str) else types))


def _limits(schema: Schema, path: str) -> None:
    for what, name in (("Length", "string"), ("Items", "array"), ("Properties", "object")):
        limits = {key: int(schema[key]) for key in (f"min{what}", f"max{what}") if key in schema}
        schema |= limits
        if len(limits) == 2 and limits[f"min{what}"] > limits[f"max{what}"] and schema.get("type") == name:
            raise unsatisfiable(path, f"'min{what}' is more than 'max{what}'")


def _format(schema: Schema) -> None:
    """Number formats become bounds; unknown formats are annotations."""
    name = schema.get("format")
    types = schema.get("type", ())
    if name in schema_words.BOUNDS and "integer" in types and "number" not in types:
        for key, bound, tighter in zip(("minimum", "maximum"), schema_words.BOUNDS[name], (max, min), strict=True):
            schema[key] = tighter(bound, schema.get(key, bound))
    if name not in FORMATS:
        schema.pop("format", None)


def _strings(schema: Schema, path: str) -> None:
    if "pattern" in schema:
        schema["pattern"] = _canonical(schema["pattern"], f"{path}/pattern")
    if "format" in schema:
        schema["pattern"] = _of_format(schema.pop("format"))
    if "patternProperties" in schema:
        patterns = dict[str, Any]()
        for pattern, one in schema["patternProperties"].items():
            if patterns.setdefault(_canonical(pattern, f"{path}/patternProperties"), one) != one:
                raise UnsupportedError("patternProperties", path, "has a pattern twice, which is not supported")
        schema["patternProperties"] = patterns


@cache
def _of_format(name: str) -> str:
    return _canonical(FORMATS[name], "")


def _canonical(pattern: str, path: str) -> str:
    try:
        return f"^(?:{as_regex(within(pattern))})$"
    except GrammarError as error:
        raise GrammarError(f"{error}: at {path}") from None


def _clamp(schema: Schema) -> None:
    """Brings bounds beyond the libraries' range nearer."""
    types = schema.get("type", ())
    whole = "integer" in types and "number" not in types
    low, high = schema_words.BOUNDS["int64"] if whole else (-_LARGEST, _LARGEST)
    for plain, exclusive, bound, beyond in (
        ("minimum", "exclusiveMinimum", low, operator.lt),
        ("maximum", "exclusiveMaximum", high, operator.gt),
    ):
        for key in (plain, exclusive):
            if key in schema and beyond(schema[key], bound):
                del schema[key]
                schema.setdefault(plain, bound)


def _numbers(schema: Schema, path: str) -> None:
    if schema.get("type") == "integer":
        up, down = ("minimum", "exclusiveMaximum"), ("maximum", "exclusiveMinimum")
        schema |= {key: math.ceil(schema[key]) for key in up if key in schema}
        schema |= {key: math.floor(schema[key]) for key in down if key in schema}
    _clamp(schema)
    for key in schema_words.NUMBER & set(schema):
        if (
            isinstance(schema[key], int)
            and abs(schema[key]) > _LARGEST
            and schema[key] not in schema_words.BOUNDS["int64"]
        ):
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
    """`const` and `enum` as one `enum`, with values of the right type and, if simple, within other keywords."""
    if not schema_words.VALUES & set(schema):
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
    return isinstance(value, int | float) and value == int(value) and abs(value) > _LARGEST


def _properties(schema: Schema, path: str) -> None:
    """Required names become properties."""
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


def in_todays_words(schema: Schema, path: str, is_draft_4: bool) -> None:
    """Rewrites old keywords of this schema, not of those inside. Raises GrammarError."""
    if is_draft_4 and "const" in schema:  # to readers of draft 4 it is an annotation, and `oneOf` is another
        raise UnsupportedError("const", path, "is no word of draft 4, which '$schema' names")
    _nothing(schema)
    _items(schema, path)
    _exclusive_bounds(schema)
    _dependencies(schema, path)
    _nullable(schema)


def _nothing(schema: Schema) -> None:
    """`{"not": {}}` is false."""
    named = schema.get("properties")
    _refute(schema, ("items", "additionalProperties"))
    if isinstance(named, dict):
        _refute(named, named)


def _refute(holder: Schema, keys: Iterable[str]) -> None:
    for key in list(keys):
        one = holder.get(key)
        if isinstance(one, dict) and one.get("not") in (True, {}):
            holder[key] = False


def _items(schema: Schema, path: str) -> None:
    """Without a list of items, `additionalItems` has no effect."""
    others = schema.pop("additionalItems", None)
    if isinstance(schema.get("items"), list):
        if "prefixItems" in schema:
            raise UnsupportedError("items", path, "is a list beside 'prefixItems'")
        schema["prefixItems"] = schema.pop("items")
        if others is not None:
            schema["items"] = others


def _exclusive_bounds(schema: Schema) -> None:
    for plain, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(schema.get(exclusive), bool) and schema.pop(exclusive) and plain in schema:
            schema[exclusive] = schema.pop(plain)


def _dependencies(schema: Schema, path: str) -> None:
    if not isinstance(schema.get("dependencies"), dict):
        return
    for name, needed in schema.pop("dependencies").items():
        word = "dependentRequired" if isinstance(needed, list) else "dependentSchemas"
        if word in schema and not isinstance(schema[word], dict):
            return
        if name in schema.setdefault(word, {}):
            raise UnsupportedError("dependencies", path, f"says of {name!r} what {word!r} does")
        schema[word][name] = needed


def _nullable(schema: Schema) -> None:
    if schema.pop("nullable", None) is True and "type" in schema:
        schema["type"] = [*listed(schema["type"]), "null"]


def check_free_keys(schema: Schema, path: str) -> None:
    """With free keys, an output may repeat one; it counts once."""
    closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    if schema.get("minProperties", 0) > 1 and not closed:
        raise UnsupportedError("minProperties", path, "above 1 is not supported where keys are free")


def _check_near_bounds(document: Document) -> None:
    """Refuses bounds near 0: llguidance 1.9.1 accepts 0 between exclusive bounds of 0 and 0.25. A number's bounds may
    be in several schemas, so each is compared with all."""
    lows, highs = set[float](), set[float]()
    for _path, schema in document.schemas:
        lows.add(max((schema[key] for key in ("minimum", "exclusiveMinimum") if key in schema), default=-math.inf))
        highs.add(min((schema[key] for key in ("maximum", "exclusiveMaximum") if key in schema), default=math.inf))
    for path, schema in document.schemas:
        for key, others, side in (("exclusiveMinimum", highs, 1), ("exclusiveMaximum", lows, -1)):
            bound = schema.get(key, 0.5)
            if bound == round(bound) and any(0 < side * (other - bound) < 1 for other in others):
                raise UnsupportedError(key, path, "within 1 of the other bound is not supported")
