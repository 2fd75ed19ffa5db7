"""Grammars made to exhaust the compiler are refused, or quick at every later step."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest
import torch
from support.cpu import reference_s
from support.grammar_walks import Walker, synthetic_vocabulary
from treeline_runtime.grammar.backend import GrammarError
from treeline_runtime.grammar.backends import Backends
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
    "words": _json({"const": "word " * 3000}),
    "many words": _json({"type": "array", "items": {"enum": ["word " * 50]}, "minItems": 20, "maxItems": 40}),
    "ambiguous": Grammar("ebnf", 'root ::= root root root | root root | "a" | ""'),
}
REFUSED = {
    "nested": Grammar("json", '{"type":"array","items":' * 10_000 + "{}" + "}" * 10_000),
    "values": _json({"const": json.loads("[" * 500 + "]" * 500)}),
    "literal": Grammar("regex", "[a-z]" + "word " * 4000),
    "repetition": _json({"pattern": "^([a-z]{100}){1000}$"}),
    "doubling": Grammar(
        "ebnf", "\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40)), 'r40 ::= "a"'])
    ),
}


@pytest.mark.deep
@pytest.mark.parametrize("name", HOSTILE)
def test_a_compiled_grammar_is_quick_at_every_step(name: str) -> None:
    """In processor time of this thread: some ten times the limit of a step."""
    most_s = 20 * reference_s()
    backend = Backends(VOCABULARY)
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
            assert time.thread_time() - began < most_s
            if token == END:
                break


@pytest.mark.parametrize("name", REFUSED)
def test_too_deep_or_too_long_grammars_are_refused(name: str) -> None:
    with pytest.raises(GrammarError, match=r"nested|too long"):
        Backends(VOCABULARY).compile(REFUSED[name])


def test_too_many_properties_are_not_given_to_llguidance() -> None:
    schema = {"type": "object", "properties": {f"p{i}": {} for i in range(400)}}
    with pytest.raises(GrammarError, match="'properties' at / with more than 300 is not supported"):
        Backends(VOCABULARY).compile(_json(schema))


def test_llguidance_forces_nothing_for_a_large_grammar() -> None:
    """Each forced character takes up to a microsecond of the thread that serves all requests."""
    backend = Backends(VOCABULARY)
    for words, forces in ((5000, True), (80_000, False)):
        compiled = backend.load(backend.compile(_json({"const": "word " * words})))
        matcher = compiled.matcher([END])
        assert matcher.forced().startswith('"word ' if forces else "")
        assert bool(matcher.forced()) is forces
        assert matcher.accept(VOCABULARY.texts.index(b'"'))


SLOW = "(([a-z]{0,30}){0,30}){0,30}"
"""Each step takes xgrammar several times as long as the one before, soon seconds."""
RULES = "a ::= b{0,30}\nb ::= c{0,30}\nc ::= [a-z]{0,30}"


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("ebnf", f"root ::= a\n{RULES}"),
        Grammar("structural_tag", json.dumps({"format": {"type": "regex", "pattern": SLOW}})),
    ],
    ids=lambda grammar: grammar.kind,
)
@pytest.mark.deep
def test_a_grammar_that_slows_xgrammar_at_each_step_is_refused(grammar: Grammar) -> None:
    with pytest.raises(GrammarError, match="too ambiguous"):
        Backends(VOCABULARY).compile(grammar)


@pytest.mark.deep
def test_a_small_text_with_a_large_compilation_is_refused_by_its_bytes() -> None:
    """It has 15 kB, which the server would expand into 300 MB."""
    rules = [f'r{i} ::= "k{i}" [a-z]+ "=" [0-9]{{1,{3 + i % 9}}}' for i in range(340)]
    source = "\n".join(["root ::= " + " | ".join(f"r{i}" for i in range(len(rules))), *rules])
    with pytest.raises(GrammarError, match=r"too large: it is compiled to \d+ MiB, 32 are the most"):
        Backends(VOCABULARY).compile(Grammar("ebnf", source))


def test_an_output_that_reaches_a_slow_part_is_ended_and_its_neighbour_is_not() -> None:
    backend = Backends(VOCABULARY)
    late = backend.load(backend.compile(Grammar("ebnf", f"root ::= [0-9]{{80}} a\n{RULES}"))).matcher([END])
    other = backend.load(backend.compile(Grammar("regex", "[a-z]*"))).matcher([END])
    masks = torch.zeros((2, (len(VOCABULARY.texts) + 31) // 32), dtype=torch.int32)
    digit, letter = (VOCABULARY.texts.index(text) for text in (b"1", b"a"))
    for token in [digit] * 80 + [letter] * 9:
        assert late.accept(token)
        assert other.accept(letter)
        backend.fill([late, other], masks, [0, 1])
        if not masks[0].any():
            break
    assert not masks[0].any()
    assert masks[1].any()
    assert not late.completed
    assert late.forced() == ""
    assert not late.accept(letter)


def test_the_largest_number_of_choices_is_distinguished() -> None:
    backend = Backends(VOCABULARY)
    texts = [f"{number:04}" + "x" * 200 for number in range(4096)]
    walk = Walker(backend, VOCABULARY).walk(
        backend.load(backend.compile(Grammar("choice", json.dumps(texts)))), seed=1, length=0, most=300, probe=0
    )
    assert walk.whole
    assert walk.text.decode() in texts
