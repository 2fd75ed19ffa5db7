"""Promises of both libraries: masks and `accept` agree, a rollback leaves no trace, each kind of grammar is
enforced."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import lark
import pytest
import torch
from support.grammar_walks import Walker, synthetic_vocabulary
from treeline_runtime.grammar.backend import GrammarBackend, GrammarError
from treeline_runtime.grammar.backends import Backends
from treeline_runtime.messages import Grammar

VOCABULARY = synthetic_vocabulary(700)
END = VOCABULARY.stop_ids[0]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["é", "日本", "a b"]}},
        "friend": {"$ref": "#"},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
GRAMMARS = [
    Grammar("json", json.dumps(PERSON)),
    Grammar("json", "{}"),
    Grammar("regex", r"(?:[a-z]+é?(?:, |\. )){1,4}\d{2,3}"),
    Grammar("ebnf", 'root ::= "(" root ")" | [a-z]{1,3} | root "+" root'),
    Grammar("choice", '["yes", "yes, please", "no", "日本", "\\"no\\"", "n"]'),
]


@pytest.fixture(scope="module")
def backend() -> GrammarBackend:
    return Backends(VOCABULARY)


@pytest.fixture(scope="module")
def walker(backend: GrammarBackend) -> Walker:
    return Walker(backend, VOCABULARY)


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: f"{grammar.kind}{len(grammar.source)}")
def test_a_rolled_back_matcher_equals_a_fresh_one(backend: GrammarBackend, walker: Walker, grammar: Grammar) -> None:
    compiled = backend.load(backend.compile(grammar))
    for seed in range(6):
        walk = walker.walk(compiled, seed, 20, 40)
        tokens = walk.tokens + [END] * walk.whole
        draw = random.Random(seed)
        matcher, place = compiled.matcher([END]), 0
        for _ in range(12):
            ahead = draw.randint(0, len(tokens) - place)
            assert all(matcher.accept(token) for token in tokens[place : place + ahead])
            place += ahead
            back = draw.randint(0, place)
            matcher.rollback(back)
            place -= back
            fresh = compiled.matcher([END])
            assert all(fresh.accept(token) for token in tokens[:place])
            assert matcher.completed == fresh.completed
            assert matcher.forced() == fresh.forced()
            if not (walk.whole and place == len(tokens)):
                assert list(walker.allowed(matcher)) == list(walker.allowed(fresh))


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: f"{grammar.kind}{len(grammar.source)}")
def test_forced_text_is_what_follows(backend: GrammarBackend, walker: Walker, grammar: Grammar) -> None:
    """Check it at each place of each whole output."""
    compiled = backend.load(backend.compile(grammar))
    for seed in range(4):
        walk = walker.walk(compiled, seed, 10, 300)
        matcher, rest = compiled.matcher([END]), walk.text
        for token in walk.tokens:
            forced = matcher.forced().encode()
            assert rest.startswith(forced) or not walk.whole, (forced, rest)
            assert matcher.accept(token)
            rest = rest[len(VOCABULARY.texts[token]) :]


def test_an_output_that_has_ended_allows_nothing_until_it_is_rolled_back(backend: GrammarBackend) -> None:
    matcher = backend.load(backend.compile(Grammar("regex", "ab?"))).matcher([END])
    mask = torch.full((1, (len(VOCABULARY.texts) + 31) // 32), -1, dtype=torch.int32)
    a = VOCABULARY.texts.index(b"a")
    assert not matcher.accept(END)
    assert matcher.accept(a)
    assert matcher.completed
    assert matcher.accept(END)
    backend.fill([matcher], mask, [0])
    assert not mask.any()
    assert (matcher.forced(), matcher.accept(a)) == ("", False)
    matcher.rollback(2)
    assert not matcher.completed
    backend.fill([matcher], mask, [0])
    assert mask.any()


def test_the_tokens_that_end_an_output_are_those_of_the_request(backend: GrammarBackend) -> None:
    compiled = backend.load(backend.compile(Grammar("choice", '["a", "ab"]')))
    a, x = VOCABULARY.texts.index(b"a"), VOCABULARY.texts.index(b"x")
    matcher = compiled.matcher([x, 31])
    mask = torch.zeros((1, (len(VOCABULARY.texts) + 31) // 32), dtype=torch.int32)
    assert matcher.accept(a)
    backend.fill([matcher], mask, [0])
    allowed = [i for i in range(len(VOCABULARY.texts)) if int(mask[0, i // 32]) >> (i % 32) & 1]
    assert {x, 31} < set(allowed)
    assert END not in allowed
    assert matcher.accept(31)


def test_many_rows_are_filled_at_once_and_others_stay_unchanged(backend: GrammarBackend, walker: Walker) -> None:
    compiled = [backend.load(backend.compile(grammar)) for grammar in GRAMMARS]
    matchers = [each.matcher([END]) for each in compiled]
    masks = torch.full((9, walker.mask.shape[1]), 77, dtype=torch.int32)
    rows = [8, 0, 3, 5, 1]
    backend.fill(matchers, masks, rows)
    for matcher, row in zip(matchers, rows, strict=True):
        walker.allowed(matcher)
        assert torch.equal(masks[row], walker.mask[0])
    assert (masks[[2, 4, 6, 7]] == 77).all()


def _takes(compiled: Any, text: str) -> bool:
    """Return whether a grammar takes a text, byte by byte."""
    matcher = compiled.matcher([END])
    return all(matcher.accept(VOCABULARY.texts.index(bytes([b]))) for b in text.encode()) and matcher.completed


def test_each_choice_can_be_made_and_nothing_else(backend: GrammarBackend, walker: Walker) -> None:
    texts = ["yes", "yes!", "y", "日本", "日", 'say "hi"', "back\\slash", "line\nbreak", "{}", "😀"]
    compiled = backend.load(backend.compile(Grammar("choice", json.dumps(texts))))
    assert [text for text in texts if not _takes(compiled, text)] == []
    assert [text for text in ["", "ye", "日本日", "yes!!", "本", "\ufffd"] if _takes(compiled, text)] == []
    walks = [walker.walk(compiled, seed, 3, 50) for seed in range(100)]
    assert {walk.text.decode() for walk in walks if walk.whole} <= set(texts)


def test_forced_text_is_whole_characters_even_if_first_bytes_are_shared(backend: GrammarBackend) -> None:
    matcher = backend.load(backend.compile(Grammar("choice", '["aé", "aè"]'))).matcher([END])
    assert matcher.forced() == "a"
    assert matcher.accept(VOCABULARY.texts.index(b"a"))
    assert matcher.accept(VOCABULARY.texts.index(b"\xc3"))
    assert matcher.forced() == ""
    alone = backend.load(backend.compile(Grammar("choice", '["éa"]'))).matcher([END])
    assert alone.accept(VOCABULARY.texts.index(b"\xc3"))
    assert alone.forced() == ""


ARITHMETIC = (
    'root ::= sum\nsum ::= product (("+" | "-") product)*\nproduct ::= value ("*" value)*\n'
    'value ::= [0-9]{1,3} | "(" sum ")" | "é" [a-c]+',
    'start: sum\nsum: product (("+" | "-") product)*\nproduct: value ("*" value)*\n'
    'value: /[0-9]/~1..3 | "(" sum ")" | "é" /[a-c]/+',
)
LISP = (
    'root ::= "(" (item (" " item)*)? ")"\nitem ::= [a-z]+ | root | "\\"" [^"]* "\\""',
    'start: "(" [item (" " item)*] ")"\nitem: /[a-z]/+ | start | "\\"" /[^"]/* "\\""',
)
PALINDROMES = (
    'root ::= "a" root "a" | "b" root "b" | "c"',
    'start: "a" start "a" | "b" start "b" | "c"',
)


@pytest.mark.parametrize(("ebnf", "other"), [ARITHMETIC, LISP, PALINDROMES], ids=["arithmetic", "lisp", "palindromes"])
def test_ebnf_accepts_the_texts_of_an_earley_parser(
    backend: GrammarBackend, walker: Walker, ebnf: str, other: str
) -> None:
    parser = lark.Lark(other, parser="earley", lexer="dynamic")
    compiled = backend.load(backend.compile(Grammar("ebnf", ebnf)))
    whole = [walk.text.decode() for walk in (walker.walk(compiled, seed, 8, 60) for seed in range(20)) if walk.whole]
    assert len(set(whole)) >= 5
    for text in whole:
        parser.parse(text)
    draw = random.Random(3)
    for text in whole:
        place = draw.randrange(len(text))
        wrong = text[:place] + draw.choice('()a1+"') + text[place + 1 :]
        assert _takes(compiled, wrong) == _parses(parser, wrong), wrong


def _parses(parser: Any, text: str) -> bool:
    try:
        parser.parse(text)
    except lark.exceptions.LarkError:
        return False
    return True


TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<call"],
        "tags": [
            {
                "type": "tag",
                "begin": "<call=f>",
                "content": {"type": "json_schema", "json_schema": {**PERSON, "required": ["name"]}},
                "end": "</call>",
            },
            {
                "type": "tag",
                "begin": "<call=g>",
                "content": {"type": "regex", "pattern": r"^v\d+(?:\.\d+)?$"},
                "end": "</call>",
            },
        ],
        "at_least_one": True,
        "stop_after_first": True,
    },
}


def test_structural_tags_enforce_schemas_and_patterns() -> None:
    backend = Backends(VOCABULARY)
    compiled = backend.load(backend.compile(Grammar("structural_tag", json.dumps(TAG))))
    walker, found = Walker(backend, VOCABULARY), 0
    for seed in range(60):
        walk = walker.walk(compiled, seed, 25, 300)
        if not walk.whole:
            continue
        name, content = re.fullmatch(r"<call=([fg])>(.*)</call>", walk.text.decode(), re.DOTALL).groups()  # type: ignore[union-attr]
        found += 1
        if name == "f":
            assert isinstance(json.loads(content)["name"], str)
        else:
            assert re.fullmatch(r"v\d+(?:\.\d+)?", content)
    assert found > 10


@pytest.mark.parametrize(
    ("said", "spaces"), [({}, 1), ({"max_whitespace_cnt": None}, 1), ({"max_whitespace_cnt": 3}, 3)]
)
def test_white_space_in_a_tags_json_comes_to_an_end(said: dict[str, Any], spaces: int) -> None:
    backend = Backends(VOCABULARY)
    content = {"type": "json_schema", "json_schema": PERSON, **said}
    compiled = backend.load(backend.compile(Grammar("structural_tag", json.dumps({"format": content}))))
    matcher = compiled.matcher([END])
    space = VOCABULARY.texts.index(b" ")
    assert matcher.accept(VOCABULARY.texts.index(b"{"))
    assert [matcher.accept(space) for _ in range(spaces + 1)] == [True] * spaces + [False]


@pytest.mark.parametrize(
    ("schema", "taken", "others"),
    [
        ({"type": "integer", "multipleOf": 7}, ["0", "-14", "700"], ["1", "71"]),
        ({"type": "integer", "multipleOf": 7, "minimum": 7, "maximum": 20}, ["7", "14"], ["0", "15", "21"]),
        ({"type": "object", "patternProperties": {"^x": {"type": "integer"}}}, ["{}", '{"xy":1}'], ['{"xy":"a"}']),
        ({"type": "object", "propertyNames": {"pattern": "^x"}}, ['{"xy":1}'], ['{"a":1}']),
    ],
)
def test_a_tags_json_accepts_its_schemas_values(schema: dict[str, Any], taken: list[str], others: list[str]) -> None:
    backend = Backends(VOCABULARY)
    content = {"type": "json_schema", "json_schema": schema}
    compiled = backend.load(backend.compile(Grammar("structural_tag", json.dumps({"format": content}))))
    for text, takes in [*((text, True) for text in taken), *((text, False) for text in others)]:
        matcher = compiled.matcher([END])
        tokens = [VOCABULARY.texts.index(char.encode()) for char in text]
        assert (all(map(matcher.accept, tokens)) and matcher.accept(END)) == takes, text


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "number", "multipleOf": 2}, "'multipleOf' at / is not supported in structural tags"),
        ({"type": "integer", "multipleOf": 2, "minimum": 1}, "'multipleOf' at / beside one bound is not"),
        ({"type": "integer", "multipleOf": 2, "minimum": 1, "maximum": 99999}, "'multipleOf' at / within more than"),
        ({"type": "integer", "multipleOf": 1.5}, "'multipleOf' at / of a fraction, or above 1024"),
        ({"patternProperties": {"^x": True}, "properties": {"a": True}}, "'patternProperties' at / of several, or"),
    ],
)
def test_unknown_words_of_tags_are_refused_by_name(schema: dict[str, Any], reason: str) -> None:
    content = {"type": "json_schema", "json_schema": schema}
    with pytest.raises(GrammarError, match=reason):
        Backends(VOCABULARY).compile(Grammar("structural_tag", json.dumps({"format": content})))


def test_structural_tags_with_unsupported_contents_are_refused() -> None:
    backend = Backends(VOCABULARY)
    tag = {
        "type": "tag",
        "begin": "<",
        "content": {"type": "json_schema", "json_schema": {"uniqueItems": True}},
        "end": ">",
    }
    with pytest.raises(GrammarError, match="'uniqueItems' at / is not supported"):
        backend.compile(Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": tag})))


@pytest.mark.parametrize(
    ("format", "reason"),
    [
        ({"type": "qwen_xml_parameter", "json_schema": {"properties": {"a": {"uniqueItems": True}}}}, "'uniqueItems'"),
        ({"type": "regex", "pattern": "[ab]", "excludes": ["a"]}, "'excludes' is not supported .* has pattern, type"),
        ({"type": "star", "content": {"type": "const_string", "value": "a", "max": 2}}, "'max' is not supported"),
        ({"type": "token", "token": "<|im_start|>"}, "given by their ids"),
    ],
)
def test_parts_of_a_structural_tag_that_the_library_ignores_are_refused(format: dict[str, Any], reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        Backends(VOCABULARY).compile(Grammar("structural_tag", json.dumps({"format": format})))


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"oneOf": [{"type": 5}, {"type": "string"}]}, "'type' at /oneOf/0"),
        ({"oneOf": [{"type": {}}, {"type": "string"}]}, "'type' at /oneOf/0"),
        ({"anyOf": [{"$ref": "#/anyOf/" + "9" * 5000}, True]}, "there is no"),
    ],
)
def test_an_invalid_schema_is_refused_by_name(backend: GrammarBackend, schema: Any, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        backend.compile(Grammar("json", json.dumps(schema)))


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("choice", json.dumps([f"choice number {i}" for i in range(2000)])),
        Grammar("ebnf", "root ::= " + " | ".join(f'"w{i}" [a-z]+' for i in range(60))),
    ],
    ids=lambda grammar: grammar.kind,
)
def test_reported_grammar_memory_is_not_far_too_low(grammar: Grammar) -> None:
    """Compare with the heap: 60 bytes for a character of llguidance's text, for xgrammar its serialised bytes."""
    backend = Backends(synthetic_vocabulary(2000))
    compiled = backend.compile(grammar)
    least = 60 * (len(compiled) - 1) if grammar.kind == "choice" else len(compiled) - 1
    assert backend.load(compiled).num_bytes >= least


def test_the_largest_number_of_choices_can_be_generated() -> None:
    """Each is written in full; one may begin another, and one is empty."""
    backend = Backends(VOCABULARY)
    texts = ["", "a", "ab", *(f"c{i} is a choice" for i in range(4093))]
    compiled = backend.load(backend.compile(Grammar("choice", json.dumps(texts))))
    walker, draw = Walker(backend, VOCABULARY), random.Random(5)
    for _ in range(20):
        matcher, said = compiled.matcher([END]), b""
        while True:
            allowed = walker.allowed(matcher)
            assert len(allowed), said
            assert (END in allowed) == (said.decode() in texts)
            token = int(allowed[draw.randrange(len(allowed))])
            assert matcher.accept(token)
            if token == END:
                break
            said += VOCABULARY.texts[token]


def test_a_too_costly_later_step_is_found_by_the_compilation() -> None:
    patterns = [{"type": "string", "pattern": f"^([a-z]{{1,{n}}}x){{1,99}}$"} for n in range(50, 90)]
    with pytest.raises(GrammarError, match="too many"):
        Backends(VOCABULARY).compile(Grammar("json", json.dumps({"anyOf": patterns, "minLength": 50})))
