"""Which keywords of JSON Schema each backend honours. What it would ignore is refused here, by keyword and path.

`for_xgrammar` and `for_llguidance` give the schema as the backend is to be given it, after `json_schema.simplify`, or
raise `UnsupportedError`. Both are for the versions that are pinned: their outputs are validated over thousands of
schemas by tests/runtime/grammar.

Neither has `minProperties` of 2 and more where keys are free (an output could say one key twice), nor what
`json_schema.simplify` refuses.

xgrammar looks at one of `$ref`, `enum`, `anyOf`, `allOf` and `type`, in this order, and at no keyword beside it; of a
string at either its pattern or its length. llguidance intersects. It has no `propertyNames`.

Not decided here: whether schemas that are intersected (`allOf`, keywords beside `$ref`) leave a value, whether a number
lies within bounds and is a multiple, whether a pattern has a text of the length; llguidance refuses these when it
compiles.
"""

from __future__ import annotations

import math
from typing import Any

from treeline_runtime.grammar.json_schema import simplify
from treeline_runtime.grammar.patterns import EmptyError, as_regex, but, whole
from treeline_runtime.grammar.schema_document import (
    Document,
    Schema,
    UnsupportedError,
    UnsupportedHereError,
    unsatisfiable,
)
from treeline_runtime.grammar.schema_words import DEFINITIONS, STRING, listed

_AS_RULES = "(?:\u00e9){0}"
"""Nothing, with a character that is not ASCII: such patterns xgrammar 0.2.8 turns into rules, and others into automata,
where an optional part may be entered in its middle (`(?:xy+)?` takes `y`)."""
_ESCAPED = ((0, 31), (34, 34), (92, 92))
_MOST_PROPERTIES = 300
"""What llguidance can go through in one step."""
_MOST_MULTIPLE = 1024
_MOST_RANGE = 10_000


def for_xgrammar(source: str) -> str:
    """The same schema as JSON. Raises GrammarError."""
    document = Document(source)
    simplify(document)
    for path, schema in document.schemas:
        _check_xgrammar(schema, path)
        _close(schema, path)
    return document.written()


def for_llguidance(source: str) -> str:
    """The same schema as JSON. Raises GrammarError."""
    document = Document(source)
    simplify(document)
    for path, schema in document.schemas:
        if "propertyNames" in schema:
            raise UnsupportedHereError("propertyNames", path)
        _check_free_keys(schema, path)
        _check_near_bounds(schema, path)
        if len(schema.get("properties", ())) > _MOST_PROPERTIES:
            raise UnsupportedHereError("properties", path, f"with more than {_MOST_PROPERTIES} is not supported")
    _check_finite(document)
    return document.written()


def _check_free_keys(schema: Schema, path: str) -> None:
    """Where keys are free, an output may say one twice: it counts once."""
    closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    if schema.get("minProperties", 0) > 1 and not closed:
        raise UnsupportedError("minProperties", path, "above 1 is not supported where keys are free")


def _check_near_bounds(schema: Schema, path: str) -> None:
    """llguidance 1.9.1 takes 0 where it is between 0 and 0.25, both exclusive."""
    low = max((schema[key] for key in ("minimum", "exclusiveMinimum") if key in schema), default=-math.inf)
    high = min((schema[key] for key in ("maximum", "exclusiveMaximum") if key in schema), default=math.inf)
    for key, bound in (("exclusiveMinimum", low), ("exclusiveMaximum", high)):
        if schema.get(key) == bound == round(bound) and high - low < 1:
            raise UnsupportedHereError(key, path, "within 1 of the other bound is not supported")


def _types(schema: Schema) -> list[str]:
    return listed(schema.get("type", []))


def _check_xgrammar(schema: Schema, path: str) -> None:
    leading = next((key for key in ("$ref", "enum", "anyOf", "allOf") if key in schema), "type")
    for key in schema:
        if key != leading and leading != "type" and key not in DEFINITIONS:
            raise UnsupportedError(key, path, f"is not supported beside {leading!r}")
    if len(schema.get("allOf", ())) > 1:
        raise UnsupportedError("allOf", path)
    types = _types(schema)
    if "string" in types and "pattern" in schema:
        if STRING & set(schema) != {"pattern"}:
            raise UnsupportedError("pattern", path, "is not supported beside a length")
        schema["pattern"] = _unescaped(schema["pattern"], f"{path}/pattern")
    if "number" in types:
        _check_number(schema, path)
    if "integer" in types:
        _check_integer(schema, path)
    if "array" in types:
        _check_array(schema, path)
    if "object" in types:
        _check_object(schema, path)


def _unescaped(pattern: str, path: str) -> str:
    """Without the characters that JSON writes with a backslash, which xgrammar would write as they are."""
    try:
        return _AS_RULES + as_regex(but(whole(pattern), _ESCAPED))
    except EmptyError:
        raise UnsupportedError("pattern", path, "with a character that JSON escapes is not supported") from None


def _check_number(schema: Schema, path: str) -> None:
    for key in ("multipleOf", "exclusiveMinimum", "exclusiveMaximum"):  # an exclusive 0 is taken, as a number
        if key in schema:
            raise UnsupportedError(key, path)
    for key in ("minimum", "maximum"):
        if key in schema and round(schema[key], 6) != schema[key]:
            raise UnsupportedError(key, path, "with more than 6 digits after the point is not supported")


def _check_integer(schema: Schema, path: str) -> None:
    if "multipleOf" not in schema:
        return
    low = max((schema[key] for key in ("minimum", "exclusiveMinimum") if key in schema), default=None)
    high = min((schema[key] for key in ("maximum", "exclusiveMaximum") if key in schema), default=None)
    bounds = (low is not None) + (high is not None)
    if not isinstance(schema["multipleOf"], int) or schema["multipleOf"] > _MOST_MULTIPLE or bounds == 1:
        raise UnsupportedError("multipleOf", path)
    if low is not None and high is not None and high - low > _MOST_RANGE:
        raise UnsupportedError("multipleOf", path)


def _check_array(schema: Schema, path: str) -> None:
    if len(schema.get("prefixItems", ())) > schema.get("maxItems", len(schema.get("prefixItems", ()))):
        raise UnsupportedError("maxItems", path, "below the number of 'prefixItems' is not supported")
    if any(item is False for item in schema.get("prefixItems", ())):
        raise UnsupportedError("prefixItems", path, "with false is not supported")


def _check_object(schema: Schema, path: str) -> None:
    _check_free_keys(schema, path)
    names, others = schema.get("properties"), schema.get("additionalProperties", True)
    if names and any(inner is False for inner in names.values()):
        raise UnsupportedError("properties", path, "with false is not supported")
    if names and "additionalProperties" in schema and others is not False:
        # The keys of others may be those of properties, spelt with escapes.
        raise UnsupportedError("additionalProperties", path, "beside 'properties' is not supported")
    for key in ("patternProperties", "propertyNames"):
        if key in schema and names:
            raise UnsupportedError(key, path, "is not supported beside 'properties'")
    if len(schema.get("patternProperties", ())) > 1 or {"patternProperties", "propertyNames"} <= set(schema):
        raise UnsupportedError("patternProperties", path, "is not supported more than once, or with 'propertyNames'")
    if "patternProperties" in schema:
        keys = schema["patternProperties"]
        schema["patternProperties"] = {_unescaped(key, f"{path}/patternProperties"): keys[key] for key in keys}
    if "propertyNames" in schema and others not in (True, {}):
        raise UnsupportedError("propertyNames", path, "is not supported beside 'additionalProperties'")
    if schema.get("required") and not names:
        raise UnsupportedError("required", path)


def _close(schema: Schema, path: str) -> None:
    """xgrammar is strict: without a word about others, there are none. That is meant for properties that are named and
    items that are counted out; where none are, others are what is there."""
    types = _types(schema)
    if "array" in types and "items" not in schema:
        counted = len(schema.get("prefixItems", ()))
        if not counted or schema.get("minItems", 0) > counted:
            schema["items"] = {}
    if "array" in types and "prefixItems" in schema:
        schema["prefixItems"] = [{} if item is True else item for item in schema["prefixItems"]]
    named = {"properties", "patternProperties", "propertyNames", "additionalProperties"} & set(schema)
    if "object" in types and not named and len(schema) > 1:
        schema["additionalProperties"] = {}


def _check_finite(document: Document) -> None:
    """Raises GrammarError for a schema whose values would have to hold such a value again, for ever."""
    finite = set[int]()
    waiting = document.schemas
    while True:
        still = [(path, schema) for path, schema in waiting if not _is_finite(schema, document, finite)]
        if not still:
            return
        if len(still) == len(waiting):
            path = min((path for path, _ in still), key=len)
            raise unsatisfiable(path, "each value would have to hold another one of its kind:")
        finite.update(id(schema) for _path, schema in waiting)
        finite.difference_update(id(schema) for _path, schema in still)
        waiting = still


def _is_finite(schema: Schema, document: Document, finite: set[int]) -> bool:
    """Whether it has a value, as far as is known of those within."""

    def known(inner: Any) -> bool:
        return inner is True or id(inner) in finite

    if "enum" in schema:
        return True
    if "$ref" in schema and not known(document.target(schema)):
        return False
    if not all(known(inner) for inner in schema.get("allOf", ())):
        return False
    if "anyOf" in schema and not any(known(inner) for inner in schema["anyOf"]):
        return False
    types = _types(schema)
    if not types or set(types) - {"array", "object"}:
        return True
    return ("object" in types and _has_object(schema, known)) or ("array" in types and _has_array(schema, known))


def _has_object(schema: Schema, known: Any) -> bool:
    properties = schema.get("properties", {})
    return all(known(properties[name]) for name in schema.get("required", ()) if name in properties)


def _has_array(schema: Schema, known: Any) -> bool:
    least, prefix = schema.get("minItems", 0), schema.get("prefixItems", [])
    return all(known(inner) for inner in prefix[:least]) and (least <= len(prefix) or known(schema.get("items", True)))
