"""Grammars made to exhaust whoever compiles them: refused, or quick at every step afterwards."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest
from support.grammar_walks import Walker, synthetic_vocabulary
from treeline_runtime.grammar.backend import GrammarError
from treeline_runtime.grammar.backends import load_backend
from treeline_runtime.messages import Grammar

VOCABULARY = synthetic_vocabulary(2000)
END = VOCABULARY.stop_ids[0]


def _json(schema: Any) -> Grammar:
    return Grammar("json", json.dumps(schema))


HOSTILE = {
    "exponential": Grammar("regex", "(a|b)*a" + "(a|b)" * 40),
    "exponential in json": _json({"pattern": "^(a|b)*a(a|b){40}$"}),
    "catastrophic": Grammar("regex", "((((a+)+)+)+)+b"),
    "repeated": Grammar("regex", "((a{1,99}){1,99}){1,99}"),
    "enum": _json({"enum": [f"value {i}" for i in range(300)]}),
    "maxLength": _json({"type": "string", "maxLength": 10**9}),
    "maxItems": _json({"type": "array", "items": {"type": "string"}, "maxItems": 10**8}),
    "ambiguous": Grammar("ebnf", 'root ::= root root root | root root | "a" | ""'),
}
REFUSED = {
    "nested": Grammar("json", '{"type":"array","items":' * 10_000 + "{}" + "}" * 10_000),
    "values": _json({"const": json.loads("[" * 500 + "]" * 500)}),
    "doubling": Grammar(
        "ebnf", "\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40)), 'r40 ::= "a"'])
    ),
}


@pytest.mark.parametrize("backend_name", ["xgrammar", "llguidance"])
@pytest.mark.parametrize("name", HOSTILE)
def test_what_compiles_is_quick_afterwards(backend_name: str, name: str) -> None:
    """In time of this thread: 50 ms are ten times what a step may take, on a loaded machine."""
    backend = load_backend(backend_name)(VOCABULARY)
    walker, draw = Walker(backend, VOCABULARY), random.Random(1)
    compiled = backend.load(backend.compile(HOSTILE[name]))
    for _ in range(2):
        matcher = compiled.matcher([END])
        for _ in range(40):
            began = time.thread_time()
            matcher.forced()
            allowed = walker.allowed(matcher)
            assert len(allowed)
            token = int(allowed[draw.randrange(len(allowed))])
            assert matcher.accept(token)
            assert time.thread_time() - began < 0.05
            if token == END:
                break


@pytest.mark.parametrize("backend_name", ["xgrammar", "llguidance"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_too_deep_or_too_long_is_refused(backend_name: str, name: str) -> None:
    with pytest.raises(GrammarError, match=r"nested|too long"):
        load_backend(backend_name)(VOCABULARY).compile(REFUSED[name])


def test_more_properties_than_a_step_can_go_through_are_not_given_to_llguidance() -> None:
    schema = {"type": "object", "properties": {f"p{i}": {} for i in range(400)}}
    with pytest.raises(GrammarError, match="'properties' at / with more than 300 is not supported"):
        load_backend("llguidance")(VOCABULARY).compile(_json(schema))
