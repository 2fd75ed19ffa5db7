"""Structural tags as xgrammar reads them, with the schemas and patterns in them treated as those that stand alone."""

from __future__ import annotations

import json
from typing import Any

from treeline_runtime.grammar.backend import GrammarError
from treeline_runtime.grammar.patterns import as_ebnf, whole
from treeline_runtime.grammar.schema_support import for_xgrammar

MAX_SPACES = 1
"""Between two words of JSON, where a tag does not say. Without a bound a model may write white space for ever, as some
do; xgrammar cannot be told to write it as outside of tags, and takes no 0."""


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


def _prepared(part: Any) -> Any:
    if isinstance(part, list):
        return [_prepared(inner) for inner in part]
    if not isinstance(part, dict):
        return part
    match part:
        case {"type": "json_schema", "any_order": True}:
            raise GrammarError("'any_order' is not supported: what is required could be left out")
        case {"type": "json_schema", "json_schema": schema}:
            # null is "not said" too
            most = MAX_SPACES if part.get("max_whitespace_cnt") is None else part["max_whitespace_cnt"]
            return {**part, "json_schema": json.loads(for_xgrammar(json.dumps(schema))), "max_whitespace_cnt": most}
        case {"type": "regex", "pattern": str(pattern)} if not part.get("excludes"):
            return {"type": "grammar", "grammar": f"root ::= {as_ebnf(whole(pattern))}"}
        case _:
            return {key: _prepared(inner) for key, inner in part.items()}
