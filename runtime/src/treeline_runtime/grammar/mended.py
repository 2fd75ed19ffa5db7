"""Rules of xgrammar without the characters that it takes and that no text has.

Its negated classes take the surrogates, whose bytes are no UTF-8; its strings with a length take control characters,
which JSON has only escaped. The classes are written anew in the rules as xgrammar serialises them; expressions refer to
each other by number, so that only the table of where each begins changes.
"""

from __future__ import annotations

import json

from treeline_runtime.grammar.satisfiable import Kind

_SURROGATES = [0xD800, 0xDFFF]
_BOUNDED_CHARACTER = [1, 34, 34, 92, 92, 13, 13, 10, 10]
_JSON_CHARACTER = [1, 0, 31, 34, 34, 92, 92]


def mended(serialized: str) -> str:
    """The rules, as `Grammar.serialize_json()` has them."""
    grammar = json.loads(serialized)
    data: list[int] = grammar["grammar_expr_data"]
    new: list[int] = []
    starts: list[int] = []
    for start in grammar["grammar_expr_indptr"]:
        kind, length = data[start], data[start + 1]
        numbers = data[start + 2 : start + 2 + length]
        if kind in (Kind.CLASS, Kind.CLASS_STAR) and numbers[0]:
            numbers = (_JSON_CHARACTER if numbers == _BOUNDED_CHARACTER else numbers) + _SURROGATES
        starts.append(len(new))
        new += [kind, len(numbers), *numbers]
    return json.dumps({**grammar, "grammar_expr_data": new, "grammar_expr_indptr": starts})
