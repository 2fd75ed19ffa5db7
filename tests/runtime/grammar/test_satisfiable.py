"""Grammars with no finite text, or only long ones, are refused; forced text comes to an end."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from treeline_runtime.grammar.backend import MAX_SHORTEST, GrammarBackend, GrammarError
from treeline_runtime.grammar.satisfiable import Rules, shortest_texts
from treeline_runtime.grammar.vocabulary import Vocabulary
from treeline_runtime.grammar.xgrammar_backend import XGrammarBackend
from treeline_runtime.grammar.xgrammar_library import load
from treeline_runtime.messages import Grammar

END = 256


@pytest.fixture(scope="module")
def backend() -> GrammarBackend:
    return XGrammarBackend(Vocabulary([bytes([i]) for i in range(256)] + [b""], {}, (END,)))


def _shortest(kind: str, source: str) -> float:
    """Return the length of the root's shortest text; inf if there is none."""
    parse = {
        "ebnf": "from_ebnf",
        "regex": "from_regex",
        "json": "from_json_schema",
        "structural_tag": "from_structural_tag",
    }
    rules = Rules(getattr(load().Grammar, parse[kind])(source).serialize_json())
    return shortest_texts(rules).get(rules.root, math.inf)


@pytest.mark.parametrize(
    ("kind", "source", "length"),
    [
        ("ebnf", 'root ::= "ab" [a-z] [0-9]* ""', 3),
        ("ebnf", 'root ::= "abc" | a | "de"\na ::= "x" | a a', 1),
        ("ebnf", 'root ::= a{3,7} "."\na ::= "xy" | "xyz"', 7),
        ("ebnf", 'root ::= a{0,7}\na ::= "xy" a', 0),
        ("ebnf", "root ::= [^a-z]", 1),
        ("ebnf", "root ::= [^\\0-\\U0010FFFF]", math.inf),
        ("ebnf", 'root ::= a b\na ::= "x" | "y" a\nb ::= "[" b "]"', math.inf),
        ("ebnf", "root ::= a\na ::= root", math.inf),
        ("regex", r"(ab){3,}\d?", 6),
        ("json", '{"type": "string", "pattern": "^[a-c]{4}x?$"}', 6),
        ("json", '{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}', math.inf),
        ("json", '{"type": "object", "properties": {"a": {"$ref": "#"}}}', 2),
        ("structural_tag", '{"type": "structural_tag", "format": {"type": "any_text"}}', 0),
    ],
)
def test_the_shortest_text_of_a_grammar(kind: str, source: str, length: float) -> None:
    assert _shortest(kind, source) == length


def _grammar(seed: int) -> dict[str, list[list[str]]]:
    """Return rules by their alternatives, each a list of quoted texts, names and repetitions; `root` is first."""
    draw = random.Random(seed)
    names = ["root", *(f"r{i}" for i in range(draw.randint(1, 6)))]

    def part() -> str:
        if draw.random() < 0.45:
            return f'"{draw.choice("xyz") * draw.randint(1, 3)}"'
        name = draw.choice(names)
        return name if draw.random() < 0.7 else f"{name}{{{draw.randint(0, 3)},{draw.randint(3, 5)}}}"

    return {name: [[part() for _ in range(draw.randint(1, 3))] for _ in range(draw.randint(1, 3))] for name in names}


def _naive(rules: dict[str, list[list[str]]]) -> dict[str, float]:
    """Compute lengths by iteration until nothing changes."""
    best: dict[str, float] = dict.fromkeys(rules, math.inf)

    def of(part: str) -> float:
        if part[0] == '"':
            return len(part) - 2
        name, _, counts = part.partition("{")
        times = int(counts.split(",")[0]) if counts else 1
        return times * best[name] if times else 0

    while True:
        new = {name: min(sum(map(of, alternative)) for alternative in rules[name]) for name in rules}
        if new == best:
            return best
        best = new


def test_shortest_texts_equal_those_of_a_naive_iteration() -> None:
    finite = 0
    for seed in range(400):
        rules = _grammar(seed)
        source = "\n".join(f"{name} ::= " + " | ".join(" ".join(a) for a in rules[name]) for name in rules)
        expected = _naive(rules)["root"]
        finite += expected < math.inf
        assert _shortest("ebnf", source) == expected, source
    assert 50 < finite < 350


def test_a_compiled_grammar_never_forces_more_than_its_shortest_text(backend: GrammarBackend) -> None:
    """Random bytes of the masks are walked, in every grammar without endless parts; the others are refused."""
    torch = pytest.importorskip("torch")
    compiled = 0
    for seed in range(150):
        rules = _grammar(seed)
        source = "\n".join(f"{name} ::= " + " | ".join(" ".join(a) for a in rules[name]) for name in rules)
        if math.inf in _naive(rules).values():
            with pytest.raises(GrammarError, match="can never be satisfied"):
                backend.compile(Grammar("ebnf", source))
            continue
        compiled += 1
        matcher = backend.load(backend.compile(Grammar("ebnf", source))).matcher([END])
        mask, draw = torch.zeros((1, 9), dtype=torch.int32), random.Random(seed)
        for _ in range(25):
            assert len(matcher.forced()) < 2000
            backend.fill([matcher], mask, [0])
            allowed = [i for i in range(257) if int(mask[0, i // 32]) >> (i % 32) & 1]
            assert allowed, source
            token = draw.choice(allowed)
            assert matcher.accept(token)
            if token == END:
                break
    assert compiled > 30


def test_a_rule_that_always_leads_to_itself_is_refused_by_name(backend: GrammarBackend) -> None:
    with pytest.raises(GrammarError, match="can never be satisfied: no finite text is a 'list'"):
        backend.compile(Grammar("ebnf", 'root ::= "x" | list\nlist ::= "[" list "]"'))


def _in_tag(schema: dict[str, Any]) -> Grammar:
    format = {"type": "json_schema", "json_schema": schema}
    return Grammar("structural_tag", json.dumps({"format": format}))


def _doubling(times: int) -> str:
    step: dict[str, Any] = {"type": "array", "minItems": 2, "maxItems": 2}
    defs = {f"d{i}": {**step, "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(times)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": {**defs, f"d{times}": {"type": "null"}}})


def test_doubling_references_are_refused_for_their_length(backend: GrammarBackend) -> None:
    assert backend.load(backend.compile(_in_tag(json.loads(_doubling(5))))).matcher([END]).forced() == "["
    with pytest.raises(GrammarError, match=f"too long.*{MAX_SHORTEST} are the most"):
        backend.compile(_in_tag(json.loads(_doubling(40))))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "integer"}, "minItems": 10**8},
        {"type": "string", "minLength": 10**6},
    ],
)
def test_a_grammar_of_only_long_texts_is_refused(backend: GrammarBackend, schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError, match="too long"):
        backend.compile(_in_tag(schema))


def test_a_string_with_a_length_takes_no_control_characters(backend: GrammarBackend) -> None:
    grammar = _in_tag({"type": "string", "minLength": 1, "maxLength": 9})
    matcher = backend.load(backend.compile(grammar)).matcher([END])
    assert matcher.accept(ord('"'))
    assert [byte for byte in range(128) if _takes(matcher, byte)] == [b for b in range(32, 128) if b not in b'"\\']


def _takes(matcher: Any, token: int) -> bool:
    taken = bool(matcher.accept(token))
    if taken:
        matcher.rollback(1)
    return taken
