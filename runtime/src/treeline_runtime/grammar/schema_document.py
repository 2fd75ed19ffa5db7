"""A JSON Schema as a document: read within bounds, and the schemas in it found: by reference, or one inside another."""

from __future__ import annotations

import json
import math
import urllib.parse
from typing import Any

from treeline_runtime.grammar.backend import GrammarError, NotHereError

Schema = dict[str, Any]

MAX_DEPTH = 100
"""Of brackets in brackets."""
_INDEX_DIGITS = 10
"""Fewer has a place in a list."""


class UnsupportedError(NotHereError):
    """A keyword that a backend would ignore, or take for something else."""

    def __init__(self, keyword: str, path: str, why: str = "is not supported") -> None:
        super().__init__(f"{keyword!r} at {path or '/'} {why}")


def unsatisfiable(path: str, why: str) -> GrammarError:
    """No value holds the schema at `path`."""
    return GrammarError(f"can never be satisfied: {why} at {path or '/'}")


def read(source: str) -> Schema | bool:
    """Raises GrammarError for what is not a schema, or is nested too deeply."""
    try:
        schema = json.loads(source, parse_constant=_refuse_constant)
        source.encode()
    except RecursionError:
        raise GrammarError(f"the schema is nested more than {MAX_DEPTH} deep") from None
    except ValueError as error:
        raise GrammarError(f"the schema is not JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise GrammarError("a schema is an object, or true or false")
    _check_values(schema)
    return schema


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not a number of JSON")


def _check_values(schema: Any) -> None:
    level = [schema]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner += value.values()
            elif isinstance(value, list):
                inner += value
            elif isinstance(value, float) and not math.isfinite(value):
                raise GrammarError("the schema has a number that is too large")
            elif isinstance(value, str):
                _check_text(value)
        if not inner:
            return
        level = inner
    raise GrammarError(f"the schema is nested more than {MAX_DEPTH} deep")


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise GrammarError("the schema has half a surrogate pair in a string") from None


def resolve(root: Schema | bool, reference: Any, path: str) -> tuple[str, Any]:
    """The path and the schema that a `$ref` at `path` means. Raises GrammarError."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise UnsupportedError("$ref", path, "may only be '#' or '#/…'")
    found: Any = root
    for part in urllib.parse.unquote(reference).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdecimal() and len(key) < _INDEX_DIGITS and int(key) < len(found):
            found = found[int(key)]
        else:
            raise GrammarError(f"'$ref' at {path or '/'}: there is no {reference!r}")
    if not isinstance(found, dict | bool):
        raise GrammarError(f"'$ref' at {path or '/'}: {reference!r} is not a schema")
    return reference[1:], found


def resolved(option: Any, root: Schema | bool) -> Any:
    """What an option refers to."""
    for _ in range(8):
        if not isinstance(option, dict) or "$ref" not in option:
            break
        option = resolve(root, option["$ref"], "")[1]
    return option


def within_schema(schema: Schema, path: str) -> list[tuple[str, Schema | bool]]:
    """The schemas directly inside, with their paths; not those behind a reference."""
    found: list[tuple[str, Any]] = []
    for key in ("properties", "patternProperties", "dependentSchemas"):
        found += [(f"{path}/{key}/{name}", inner) for name, inner in schema.get(key, {}).items()]
    for key in ("prefixItems", "anyOf", "oneOf", "allOf"):
        found += [(f"{path}/{key}/{i}", inner) for i, inner in enumerate(schema.get(key, []))]
    for key in ("items", "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else"):
        if key in schema:
            found.append((f"{path}/{key}", schema[key]))
    for place, inner in found:
        if not isinstance(inner, dict | bool):
            raise GrammarError(f"a schema is an object, or true or false: at {place}")
    return found
