"""A parser understands every output that its structure allows: outputs are drawn at random from xgrammar's own
masks."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from support.outputs import Found, read, same_however_cut
from support.runtime_grammars import vocabulary
from treeline_runtime import parsers
from treeline_runtime.grammar.xgrammar_backend import XGrammarBackend
from treeline_runtime.messages import Grammar
from treeline_runtime.parsers.structures import Function

xgr = pytest.importorskip("xgrammar")

WEATHER = Function(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "units": {"$ref": "#/$defs/units"},
            "where": {"type": "object", "properties": {"at": {"type": "array", "items": {"type": "number"}}}},
            "exact": {"type": "boolean"},
        },
        "required": ["city", "units"],
        "additionalProperties": False,
        "$defs": {"units": {"enum": ["C", "5"]}},
    },
)
CHOICE = Function("choose", {"anyOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]}, {"type": "integer"}]})
FUNCTIONS = (
    WEATHER,
    Function("get", {"type": "object", "properties": {"q": {"type": "string"}}}),
    Function("nothing"),
    Function("anything", {"type": "object", "required": ["x"]}, strict=False),
)
FORMATS = ("hermes", "llama3", "mistral", "deepseek_v3", "deepseek_v31", "gpt_oss", "pythonic", "qwen3_coder")
WORDS = (
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<|channel|>",
    "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>", "<function=", "</function>", "<parameter=",
    "</parameter>", "[get(", "get_weather", '{"name": ', "analysis", "final", "commentary", "assistant", "nothing",
)  # fmt: skip
CHARS = "".join(map(chr, range(32, 127))) + "\n\té｜▁"


VOCABULARY = ["<eos>", *WORDS, *CHARS]


@cache
def _tokenizer() -> Any:
    return xgr.TokenizerInfo(VOCABULARY, xgr.VocabType.RAW, stop_token_ids=[0])


def drawn(structure: dict[str, Any], seed: int, longest: int = 250) -> str | None:
    """Draw an output that the structure allows; None if none ended in time."""
    tokens = _tokenizer()
    matcher = xgr.GrammarMatcher(xgr.GrammarCompiler(tokens, cache_enabled=False).compile_structural_tag(structure))
    mask = xgr.allocate_token_bitmask(1, tokens.vocab_size)
    chance = random.Random(seed)
    text = ""
    for count in range(longest):
        matcher.fill_next_token_bitmask(mask)
        bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[: tokens.vocab_size]
        allowed = np.flatnonzero(bits).tolist()
        words = [token for token in allowed if 0 < token <= len(WORDS)]
        ends = [token for token in allowed if VOCABULARY[token] in ('"', "}", "]", ")")]
        if 0 in allowed and chance.random() < (0.1 if count < longest // 2 else 1):
            return text
        if words and chance.random() < 0.4:
            token = chance.choice(words)
        elif ends and chance.random() < 0.3:
            token = chance.choice(ends)
        else:
            token = chance.choice([token for token in allowed if token] or allowed)
        if not token:
            return text
        assert matcher.accept_token(token)
        text += VOCABULARY[token]
    return None


def calls_in(found: Found, functions: tuple[Function, ...]) -> list[str]:
    """Return the names of the called functions, after validating their arguments."""
    schemas = {function.name: function.schema for function in functions}
    for kind, value in found:
        if kind == "call":
            jsonschema.validate(value[1], schemas[value[0]])
    return [value[0] for kind, value in found if kind == "call"]


def parser(tools: str, functions: tuple[Function, ...]) -> Callable[[], parsers.OutputParser]:
    schemas = {function.name: function.parameters for function in functions}
    return lambda: parsers.new(None, tools, schemas, "<|start|>assistant")


@pytest.mark.deep
@pytest.mark.parametrize("tools", FORMATS)
def test_every_allowed_output_is_parsed_into_valid_calls(tools: str) -> None:
    called: list[str] = []
    for seed in range(48):
        required, parallel, only = bool(seed & 1), bool(seed & 2), seed % 5 == 0
        functions = (FUNCTIONS[seed % 4],) if only else FUNCTIONS
        structure = parsers.structure(tools, functions, required=required, parallel=parallel)
        text = drawn(structure, seed)
        if text is None:
            continue
        found = read(parser(tools, functions)(), text)
        calls = calls_in(found, functions)
        called += calls
        if required:
            assert calls
            assert not [value for kind, value in found if kind == "said"]
        if not parallel:
            assert len(calls) <= 1
        same_however_cut(parser(tools, functions), text, [seed, 3 * seed])
    assert set(called) == {function.name for function in FUNCTIONS}


def accepts(structure: dict[str, Any], text: str) -> bool:
    """Return whether that is a whole output."""
    matcher = xgr.GrammarMatcher(
        xgr.GrammarCompiler(_tokenizer()).compile_structural_tag(structure), terminate_without_stop_token=True
    )
    return matcher.accept_string(text) and matcher.is_terminated()


def accepts_so_far(structure: dict[str, Any], text: str) -> bool:
    """Return whether an output may begin like that."""
    compiled = xgr.GrammarCompiler(_tokenizer()).compile_structural_tag(structure)
    return bool(xgr.GrammarMatcher(compiled).accept_string(text))


CALL = '<tool_call>\n{"name": "get", "arguments": {"q": "x"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "auto", "required", "single"),
    [
        ("Hello.", True, False, False),
        (CALL, True, True, True),
        (f"Well: {CALL}", True, False, False),
        (f"{CALL}\n{CALL}", True, True, False),
        (f"{CALL} So.", True, False, False),
        (CALL.replace('"x"', "1"), False, False, False),
        (CALL.replace("get", "put"), False, False, False),
        ("<tool_call>", False, False, False),
        ("", True, False, False),
    ],
)
def test_a_structure_follows_the_choice(text: str, auto: bool, required: bool, single: bool) -> None:
    """`single`: a call is required, and parallel calls are off."""
    for accepted, must, parallel in ((auto, False, True), (required, True, True), (single, True, False)):
        structure = parsers.structure("hermes", FUNCTIONS, required=must, parallel=parallel)
        assert accepts(structure, text) is accepted


@pytest.mark.parametrize("tools", FORMATS)
@pytest.mark.parametrize("required", [False, True])
def test_a_structure_grows_linearly_with_its_functions(tools: str, required: bool) -> None:
    def size(count: int) -> int:
        functions = [Function(f"look_up_{i:04}", WEATHER.parameters) for i in range(count)]
        return len(json.dumps(parsers.structure(tools, functions, required=required, parallel=True)))

    assert size(1024) < 1200 * size(1)


@pytest.mark.parametrize("tools", FORMATS)
def test_a_compiled_structure_grows_slower_than_its_functions(tools: str) -> None:
    """A vocabulary of words is used: all calls share their beginnings, which need no masks for each."""
    backend = XGrammarBackend(vocabulary())

    def size(count: int) -> int:
        functions = [Function(f"{'abcdefgh'[i % 8]}_{i}") for i in range(count)]
        structure = parsers.structure(tools, functions, required=True, parallel=True)
        return len(backend.compile(Grammar("structural_tag", json.dumps(structure))))

    assert size(64) < 2 * size(16)


@pytest.mark.parametrize("count", [2, 200])
def test_calls_of_many_functions_in_python_lists(count: int) -> None:
    """With few functions, free text may hold a list of several calls, with many only lists of one; required calls are
    always one list."""
    functions = [Function(f"f{i}") for i in range(count)]
    both, apart = "[f0(), f1()]", "[f0()] and [f1()]"
    required = parsers.structure("pythonic", functions, required=True, parallel=True)
    assert accepts(required, both)
    assert not accepts(required, apart)
    assert not accepts(parsers.structure("pythonic", functions, required=True, parallel=False), both)
    free = parsers.structure("pythonic", functions, required=False, parallel=True)
    assert accepts_so_far(free, both) is (count == 2)
    assert accepts_so_far(free, apart)
    assert accepts_so_far(free, "See [1], [f] and f0(")
    assert not accepts_so_far(free, "[f0(x")
    found = read(parser("pythonic", tuple(functions))(), apart)
    assert [value[0] for kind, value in found if kind == "call"] == ["f0", "f1"]


def test_arguments_are_an_object_even_if_the_schema_allows_more() -> None:
    structure = parsers.structure("hermes", [CHOICE], required=True, parallel=True)
    call = '<tool_call>\n{"name": "choose", "arguments": %s}\n</tool_call>'
    assert accepts(structure, call % '{"a": 1}')
    assert not accepts(structure, call % "1")
    assert not accepts(structure, call % '{"a": 2}')
