"""Structural tags as xgrammar reads them, with the schemas and patterns in them treated as those that stand alone."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from typing import Any

from treeline_runtime.grammar.backend import GrammarError
from treeline_runtime.grammar.patterns import as_regex, whole
from treeline_runtime.grammar.schema_support import AS_RULES, for_xgrammar
from treeline_runtime.grammar.xgrammar_library import load as load_library

MAX_SPACES = 1
"""Between two words of JSON, where a tag does not say. Without a bound a model may write white space for ever, as some
do; xgrammar cannot be made to write it as outside of tags, and takes no 0."""


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
    """What each type of format has."""
    formats = vars(load_library().structural_tag).items()
    fields = [one.model_fields for name, one in formats if name.endswith("Format") and hasattr(one, "model_fields")]
    return {found["type"].default: frozenset(found) for found in fields if "type" in found}


def _check_members(part: dict[str, Any]) -> None:
    """Raises GrammarError for what the library would pass over."""
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
            return {**part, "json_schema": json.loads(for_xgrammar(json.dumps(schema)))}
        case {"type": "json_schema", "json_schema": schema}:
            # null is "not said" too
            most = MAX_SPACES if part.get("max_whitespace_cnt") is None else part["max_whitespace_cnt"]
            return {**part, "json_schema": json.loads(for_xgrammar(json.dumps(schema))), "max_whitespace_cnt": most}
        case {"type": "regex", "pattern": str(pattern)}:
            return {"type": "regex", "pattern": AS_RULES + as_regex(whole(pattern))}
        case _:
            return {key: _prepared(inner) for key, inner in part.items()}
