"""Structural tags for xgrammar, with their schemas and patterns treated like standalone ones.

Refuses, by keyword and path, the parts of a schema that xgrammar 0.2.8 would ignore. It reads one of `$ref`, `enum`,
`anyOf`, `allOf` and `type`, in this order, and nothing beside it; of a string, either pattern or length.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from functools import cache
from typing import Any

from treeline_runtime.grammar.backend import GrammarError
from treeline_runtime.grammar.json_schema import check_free_keys, simplify
from treeline_runtime.grammar.patterns import EmptyError, as_regex, but, whole
from treeline_runtime.grammar.schema_document import Document, Schema, UnsupportedError
from treeline_runtime.grammar.schema_words import DEFINITIONS, types
from treeline_runtime.grammar.xgrammar_library import load as load_library

MAX_SPACES = 1
"""White space between tokens of JSON, if a tag does not say. Unbounded white space may never end with some models;
xgrammar does not accept 0."""

_AS_RULES = "(?:\u00e9){0}"
"""Matches nothing; contains a character beyond ASCII: xgrammar 0.2.8 turns such patterns into rules, and others into
automata, which may enter an optional part in its middle (`(?:xy+)?` takes `y`)."""
_ESCAPED = ((0, 31), (34, 34), (92, 92))
_IN_TAGS = "is not supported in structural tags and strict tools"
_NOT_IN_TAGS = {
    "oneOf": (),
    "multipleOf": ("number",),
    "exclusiveMinimum": ("number",),  # an exclusive 0 is taken, as a number
    "exclusiveMaximum": ("number",),
}
"""Keyword → the types that it concerns; () means all."""
_MOST_MULTIPLE = 1024
_MOST_RANGE = 10_000


def for_xgrammar_tags(source: str) -> str:
    """The same structural tag as JSON. Raises GrammarError."""
    try:
        return json.dumps(_prepared(json.loads(source)))
    except ValueError as error:
        if isinstance(error, GrammarError):
            raise
        raise GrammarError(f"the structural tag is not JSON: {error}") from None
    except RecursionError:
        raise GrammarError("the structural tag is nested too deeply") from None


_TOKENS = {"token", "exclude_tokens", "trigger_tokens"}


@cache
def _members() -> dict[str, frozenset[str]]:
    formats = vars(load_library().structural_tag).items()
    fields = [one.model_fields for name, one in formats if name.endswith("Format") and hasattr(one, "model_fields")]
    return {found["type"].default: frozenset(found) for found in fields if "type" in found}


def _check_members(part: dict[str, Any]) -> None:
    """Raises GrammarError for members that the library would ignore."""
    kind = part.get("type")
    known = _members().get(kind) if isinstance(kind, str) else None
    for name in sorted(part.keys() - known) if known else ():
        raise GrammarError(
            f"{name!r} is not supported in a structural tag's {kind!r}, which has {_listed(known or ())}"
        )
    for name in _TOKENS & part.keys() if known else ():
        tokens = part[name] if isinstance(part[name], list) else [part[name]]
        if any(isinstance(token, str) for token in tokens):
            raise GrammarError(f"{name!r} in a structural tag: tokens are given by their ids, not by their texts")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _prepared(part: Any) -> Any:
    if isinstance(part, list):
        return [_prepared(inner) for inner in part]
    if not isinstance(part, dict):
        return part
    _check_members(part)
    match part:
        case {"type": "json_schema", "any_order": True}:
            raise GrammarError("'any_order' is not supported: what is required could be left out")
        case {"type": "qwen_xml_parameter", "json_schema": schema}:
            return {**part, "json_schema": _schema(schema)}
        case {"type": "json_schema", "json_schema": schema}:
            # null means absent too
            most = MAX_SPACES if part.get("max_whitespace_cnt") is None else part["max_whitespace_cnt"]
            return {**part, "json_schema": _schema(schema), "max_whitespace_cnt": most}
        case {"type": "regex", "pattern": str(pattern)}:
            return {"type": "regex", "pattern": _AS_RULES + as_regex(whole(pattern))}
        case _:
            return {key: _prepared(inner) for key, inner in part.items()}


def _schema(schema: Any) -> Any:
    """Returns the schema for xgrammar. Raises UnsupportedError for parts that it would ignore."""
    document = Document(json.dumps(schema))
    simplify(document)
    for path, one in document.schemas:
        _check_in_tags(one, path)
        check_free_keys(one, path)
        _close(one)
    return json.loads(document.written())


def _check_in_tags(schema: Schema, path: str) -> None:
    names = types(schema)
    leading = next((key for key in ("$ref", "enum", "anyOf", "allOf") if key in schema), "type")
    for key in schema:
        if key != leading and leading != "type" and key not in DEFINITIONS:
            raise UnsupportedError(key, path, f"beside {leading!r} {_IN_TAGS}")
        if key in _NOT_IN_TAGS and (not _NOT_IN_TAGS[key] or set(_NOT_IN_TAGS[key]) & set(names)):
            raise UnsupportedError(key, path, _IN_TAGS)
    if len(schema.get("allOf", ())) > 1:
        raise UnsupportedError("allOf", path, f"of more than one schema {_IN_TAGS}")
    if "string" in names and "pattern" in schema:
        if {"minLength", "maxLength"} & set(schema):
            raise UnsupportedError("pattern", path, f"beside a length {_IN_TAGS}")
        schema["pattern"] = _unescaped(schema["pattern"], f"{path}/pattern")
    for key in ("minimum", "maximum"):
        if "number" in names and key in schema and round(schema[key], 6) != schema[key]:
            raise UnsupportedError(key, path, f"with more than 6 digits after the point {_IN_TAGS}")
    if "integer" in names and "multipleOf" in schema:
        _check_multiple(schema, path)
    if "array" in names:
        prefix = schema.get("prefixItems", [])
        if len(prefix) > schema.get("maxItems", math.inf) or False in prefix:
            raise UnsupportedError("prefixItems", path, f"of which some cannot be there {_IN_TAGS}")
    if "object" in names:
        _check_object_in_tags(schema, path)


def _check_object_in_tags(schema: Schema, path: str) -> None:
    names, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    if any(inner is False for inner in names.values()):
        raise UnsupportedError("properties", path, f"with false {_IN_TAGS}")
    if names and schema.get("additionalProperties", False) is not False:
        # an additional key may be a property's name spelt with escapes
        raise UnsupportedError("additionalProperties", path, f"beside 'properties' {_IN_TAGS}")
    if schema.get("required") and not names:
        raise UnsupportedError("required", path, f"of others than 'properties' {_IN_TAGS}")
    if len(patterns) > 1 or (patterns and names):
        raise UnsupportedError("patternProperties", path, f"of several, or beside 'properties', {_IN_TAGS}")
    if patterns:
        there = f"{path}/patternProperties"
        schema["patternProperties"] = {_unescaped(key, there): inner for key, inner in patterns.items()}


def _check_multiple(schema: Schema, path: str) -> None:
    """xgrammar counts the remainder, or lists the values between two bounds."""
    low = max((schema[key] for key in ("minimum", "exclusiveMinimum") if key in schema), default=None)
    high = min((schema[key] for key in ("maximum", "exclusiveMaximum") if key in schema), default=None)
    if not isinstance(schema["multipleOf"], int) or schema["multipleOf"] > _MOST_MULTIPLE:
        raise UnsupportedError("multipleOf", path, f"of a fraction, or above {_MOST_MULTIPLE}, {_IN_TAGS}")
    if (low is None) != (high is None):
        raise UnsupportedError("multipleOf", path, f"beside one bound {_IN_TAGS}")
    if low is not None and high is not None and high - low > _MOST_RANGE:
        raise UnsupportedError("multipleOf", path, f"within more than {_MOST_RANGE} {_IN_TAGS}")


def _unescaped(pattern: str, path: str) -> str:
    """Returns the pattern without characters that JSON escapes, which xgrammar would write unescaped."""
    try:
        return _AS_RULES + as_regex(but(whole(pattern), _ESCAPED))
    except EmptyError:
        raise UnsupportedError("pattern", path, f"with a character that JSON escapes {_IN_TAGS}") from None


def _close(schema: Schema) -> None:
    """Allows any items or properties where a schema names none; strict xgrammar would allow none at all."""
    names = types(schema)
    if "array" in names and "items" not in schema:
        counted = len(schema.get("prefixItems", ()))
        if not counted or schema.get("minItems", 0) > counted:
            schema["items"] = {}
    if "array" in names and "prefixItems" in schema:
        schema["prefixItems"] = [{} if item is True else item for item in schema["prefixItems"]]
    named = {"properties", "patternProperties", "additionalProperties"} & set(schema)
    if "object" in names and not named and len(schema) > 1:
        schema["additionalProperties"] = {}
