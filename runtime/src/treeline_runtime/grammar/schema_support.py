"""Which keywords of JSON Schema each library honours. What it would ignore is refused here, by keyword and path.

`for_llguidance` and `for_xgrammar` give the schema as the library is to be given it, after `json_schema.simplify`, or
raise `UnsupportedError`. Both are for the versions that are pinned: their outputs are validated over thousands of
schemas by tests/runtime/grammar.

llguidance intersects schemas, and refuses by itself what it has not: a `oneOf` whose members may share a value,
schemas that leave no value together, a number that is within no bounds or no multiple, a pattern without a text of the
length. xgrammar, which has the schemas within structural tags, looks at one of `$ref`, `enum`, `anyOf`, `allOf` and
`type`, in this order, and at no keyword beside it; of a string at either its pattern or its length.
"""

from __future__ import annotations

import math

from treeline_runtime.grammar.json_schema import simplify
from treeline_runtime.grammar.patterns import EmptyError, as_regex, but, whole
from treeline_runtime.grammar.schema_document import Document, Schema, UnsupportedError
from treeline_runtime.grammar.schema_words import DEFINITIONS, listed

_MOST_PROPERTIES = 300
"""What llguidance can go through in one step."""
AS_RULES = "(?:\u00e9){0}"
"""Nothing, with a character that is not ASCII: such patterns xgrammar 0.2.8 turns into rules, and others into automata,
where an optional part may be entered in its middle (`(?:xy+)?` takes `y`)."""
_ESCAPED = ((0, 31), (34, 34), (92, 92))
_IN_TAGS = "is not supported in structural tags and strict tools"
_NOT_IN_TAGS = {
    "oneOf": (),
    "multipleOf": ("number",),
    "exclusiveMinimum": ("number",),  # an exclusive 0 is taken, as a number
    "exclusiveMaximum": ("number",),
}
"""By the types that it says something of; (): of all."""
_MOST_MULTIPLE = 1024
_MOST_RANGE = 10_000


def for_llguidance(source: str) -> str:
    """The same schema as JSON. Raises GrammarError."""
    document = Document(source)
    simplify(document)
    for path, schema in document.schemas:
        _check_free_keys(schema, path)
        if len(schema.get("properties", ())) > _MOST_PROPERTIES:
            raise UnsupportedError("properties", path, f"with more than {_MOST_PROPERTIES} is not supported")
    _check_near_bounds(document)
    return document.written()


def for_xgrammar(source: str) -> str:
    """The same schema as JSON. Raises GrammarError."""
    document = Document(source)
    simplify(document)
    for path, schema in document.schemas:
        _check_in_tags(schema, path)
        _check_free_keys(schema, path)
        _close(schema)
    return document.written()


def _types(schema: Schema) -> list[str]:
    return listed(schema.get("type", []))


def _check_free_keys(schema: Schema, path: str) -> None:
    """Where keys are free, an output may say one twice: it counts once."""
    closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    if schema.get("minProperties", 0) > 1 and not closed:
        raise UnsupportedError("minProperties", path, "above 1 is not supported where keys are free")


def _check_near_bounds(document: Document) -> None:
    """llguidance 1.9.1 takes 0 where it is between 0 and 0.25, both exclusive. Bounds of one number may stand in
    several schemas, so each is held against all."""
    lows, highs = set[float](), set[float]()
    for _path, schema in document.schemas:
        lows.add(max((schema[key] for key in ("minimum", "exclusiveMinimum") if key in schema), default=-math.inf))
        highs.add(min((schema[key] for key in ("maximum", "exclusiveMaximum") if key in schema), default=math.inf))
    for path, schema in document.schemas:
        for key, others, side in (("exclusiveMinimum", highs, 1), ("exclusiveMaximum", lows, -1)):
            bound = schema.get(key, 0.5)
            if bound == round(bound) and any(0 < side * (other - bound) < 1 for other in others):
                raise UnsupportedError(key, path, "within 1 of the other bound is not supported")


def _check_in_tags(schema: Schema, path: str) -> None:
    types = _types(schema)
    leading = next((key for key in ("$ref", "enum", "anyOf", "allOf") if key in schema), "type")
    for key in schema:
        if key != leading and leading != "type" and key not in DEFINITIONS:
            raise UnsupportedError(key, path, f"beside {leading!r} {_IN_TAGS}")
        if key in _NOT_IN_TAGS and (not _NOT_IN_TAGS[key] or set(_NOT_IN_TAGS[key]) & set(types)):
            raise UnsupportedError(key, path, _IN_TAGS)
    if len(schema.get("allOf", ())) > 1:
        raise UnsupportedError("allOf", path, f"of more than one schema {_IN_TAGS}")
    if "string" in types and "pattern" in schema:
        if {"minLength", "maxLength"} & set(schema):
            raise UnsupportedError("pattern", path, f"beside a length {_IN_TAGS}")
        schema["pattern"] = _unescaped(schema["pattern"], f"{path}/pattern")
    for key in ("minimum", "maximum"):
        if "number" in types and key in schema and round(schema[key], 6) != schema[key]:
            raise UnsupportedError(key, path, f"with more than 6 digits after the point {_IN_TAGS}")
    if "integer" in types and "multipleOf" in schema:
        _check_multiple(schema, path)
    if "array" in types:
        prefix = schema.get("prefixItems", [])
        if len(prefix) > schema.get("maxItems", math.inf) or False in prefix:
            raise UnsupportedError("prefixItems", path, f"of which some cannot be there {_IN_TAGS}")
    if "object" in types:
        _check_object_in_tags(schema, path)


def _check_object_in_tags(schema: Schema, path: str) -> None:
    names, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    if any(inner is False for inner in names.values()):
        raise UnsupportedError("properties", path, f"with false {_IN_TAGS}")
    if names and schema.get("additionalProperties", False) is not False:
        # the keys of others may be those of properties, spelt with escapes
        raise UnsupportedError("additionalProperties", path, f"beside 'properties' {_IN_TAGS}")
    if schema.get("required") and not names:
        raise UnsupportedError("required", path, f"of others than 'properties' {_IN_TAGS}")
    if len(patterns) > 1 or (patterns and names):
        raise UnsupportedError("patternProperties", path, f"of several, or beside 'properties', {_IN_TAGS}")
    if patterns:
        there = f"{path}/patternProperties"
        schema["patternProperties"] = {_unescaped(key, there): inner for key, inner in patterns.items()}


def _check_multiple(schema: Schema, path: str) -> None:
    """xgrammar counts the remainder, or lists what is between two bounds."""
    low = max((schema[key] for key in ("minimum", "exclusiveMinimum") if key in schema), default=None)
    high = min((schema[key] for key in ("maximum", "exclusiveMaximum") if key in schema), default=None)
    if not isinstance(schema["multipleOf"], int) or schema["multipleOf"] > _MOST_MULTIPLE:
        raise UnsupportedError("multipleOf", path, f"of a fraction, or above {_MOST_MULTIPLE}, {_IN_TAGS}")
    if (low is None) != (high is None):
        raise UnsupportedError("multipleOf", path, f"beside one bound {_IN_TAGS}")
    if low is not None and high is not None and high - low > _MOST_RANGE:
        raise UnsupportedError("multipleOf", path, f"within more than {_MOST_RANGE} {_IN_TAGS}")


def _unescaped(pattern: str, path: str) -> str:
    """Without the characters that JSON writes with a backslash, which xgrammar would write as they are."""
    try:
        return AS_RULES + as_regex(but(whole(pattern), _ESCAPED))
    except EmptyError:
        raise UnsupportedError("pattern", path, f"with a character that JSON escapes {_IN_TAGS}") from None


def _close(schema: Schema) -> None:
    """xgrammar is strict: without a word about others, there are none. That is meant for properties that are named and
    items that are counted out; where none are, others are what is there."""
    types = _types(schema)
    if "array" in types and "items" not in schema:
        counted = len(schema.get("prefixItems", ()))
        if not counted or schema.get("minItems", 0) > counted:
            schema["items"] = {}
    if "array" in types and "prefixItems" in schema:
        schema["prefixItems"] = [{} if item is True else item for item in schema["prefixItems"]]
    named = {"properties", "patternProperties", "additionalProperties"} & set(schema)
    if "object" in types and not named and len(schema) > 1:
        schema["additionalProperties"] = {}
