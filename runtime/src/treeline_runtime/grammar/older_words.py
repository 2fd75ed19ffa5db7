"""What older drafts of JSON Schema (4 to 2019-09) and OpenAPI 3.0 say in words of their own, in those of 2020-12."""

from __future__ import annotations

from collections.abc import Iterable

from treeline_runtime.grammar.schema_document import Schema, UnsupportedError
from treeline_runtime.grammar.schema_words import listed


def in_todays_words(schema: Schema, path: str, is_draft_4: bool) -> None:
    """Rewrites this schema, not those inside. Raises GrammarError."""
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
    """Without a list of items, `additionalItems` says nothing."""
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
    for name, needed in schema.pop("dependencies", {}).items():
        word = "dependentRequired" if isinstance(needed, list) else "dependentSchemas"
        if name in schema.setdefault(word, {}):
            raise UnsupportedError("dependencies", path, f"says of {name!r} what {word!r} does")
        schema[word][name] = needed


def _nullable(schema: Schema) -> None:
    if schema.pop("nullable", None) is True and "type" in schema:
        schema["type"] = [*listed(schema["type"]), "null"]
