"""Every finished output satisfies its grammar: thousands of JSON Schemas, judged by `jsonschema`."""

from __future__ import annotations

import collections
import json
import os
import re
from typing import Any

import pytest
from support.grammar_schemas import Generator, judge, parse
from support.grammar_walks import Walker, synthetic_vocabulary, tiny_vocabulary
from treeline_runtime.grammar.backend import GrammarError
from treeline_runtime.grammar.backends import Backends
from treeline_runtime.messages import Grammar

pytestmark = pytest.mark.deep

COUNT = int(os.environ.get("TREELINE_SCHEMAS", "1000"))
VOCABULARIES = {"synthetic": lambda: synthetic_vocabulary(700), "tiny": tiny_vocabulary}
REASONS = [
    r"'(not|if|uniqueItems|contains|propertyNames|oneOf)' at .+ is not supported",
    r"'enum' at .+ has an integer beyond 2\^53",
    r"'minProperties' at .+ above 1 is not supported where keys are free",
    r"'unevaluatedProperties' at .+ is not supported",
    r"'exclusiveM(in|ax)imum' at .+ within 1 of the other bound is not supported",
    r"range contains no multipleOf value",
    r"a (lookaround|backreference) in the pattern",
    r"is not a regular expression: bad escape \\p",
    r"is not a regular expression: global flags not at the start",
    r"refers to itself for the same value",
    r"can never be satisfied: ",
    r"Unsatisfiable schema: ",
    r"patternProperty regexes .* not disjoint",
    r"min/maxProperties only supported when all keys listed in \"properties\" are required",
    r"(minProperties|maxProperties|minItems|maxItems) is (greater|less) than the number of",
    r"circular references with sibling keys are not supported",
]
"""Reasons to refuse schemas of the corpus: contradictions, and keywords that the runtime's README.md lists as
unsupported."""


def _refusals(tag: bool, vocabulary: str, seeds: range, length: int) -> collections.Counter[str]:
    """Walk over each schema once. Return the reasons of those that were refused."""
    tokens = VOCABULARIES[vocabulary]()
    grammars = Backends(tokens)
    walker, refused, unfinished = Walker(grammars, tokens), collections.Counter[str](), 0
    for seed in seeds:
        schema = Generator(seed).schema()
        try:
            compiled = grammars.load(grammars.compile(_in_tag(schema) if tag else Grammar("json", json.dumps(schema))))
        except GrammarError as error:
            refused[str(error)] += 1
            continue
        walk = walker.walk(compiled, seed, length, 400)
        if walk.whole:
            _check(schema, walk.text, seed)
        unfinished += not walk.whole
    assert unfinished < 0.05 * len(seeds)
    return refused


def _in_tag(schema: Any) -> Grammar:
    format = {"type": "json_schema", "json_schema": schema}
    return Grammar("structural_tag", json.dumps({"format": format}))


def _check(schema: Any, text: bytes, seed: int) -> None:
    error = next(judge(schema).iter_errors(parse(text.decode())), None)
    assert error is None, f"seed {seed}: {text!r} is no {json.dumps(schema)}: {error}"


@pytest.mark.timeout(3600)
def test_finished_outputs_are_valid() -> None:
    refused = _refusals(False, "synthetic", range(COUNT), length=16)
    unexplained = [reason for reason in refused if not any(re.search(known, reason) for known in REASONS)]
    assert not unexplained
    kinds = collections.Counter(next(known for known in REASONS if re.search(known, why)) for why in refused.elements())
    assert refused.total() < 0.3 * COUNT, kinds.most_common()


@pytest.mark.parametrize("tag", [False, True])
def test_finished_outputs_are_valid_with_the_tiny_models_tokens(tag: bool) -> None:
    seeds = range(COUNT, COUNT + COUNT // 10)
    assert _refusals(tag, "tiny", seeds, length=8).total() < 0.6 * len(seeds)
