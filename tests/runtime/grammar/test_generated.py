"""Outputs of the tiny model at a high temperature, under generated schemas, patterns and grammars, are correct by
independent libraries. `TREELINE_SCHEMAS` is the number of schemas."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from lark import Lark
from support.grammar_schemas import Generator, judge, parse
from support.grammar_walks import tiny_vocabulary
from treeline_runtime import Engine, SamplingParams
from treeline_runtime.grammar.backend import GrammarError
from treeline_runtime.grammar.backends import Backends
from treeline_runtime.messages import Grammar

TINY = Path(__file__).parents[3] / "models" / "tiny"
COUNT = min(int(os.environ.get("TREELINE_SCHEMAS", "100")), 5000)
PATTERNS = {
    r"\d{4}-(0[1-9]|1[0-2])-\d{2}": "date",
    r"[a-z0-9]{1,9}(\.[a-z0-9]{1,9})?@[a-z]{2,9}\.(com|org)": "address",
    r"(25[0-5]|2[0-4]\d|1?\d?\d)(\.(25[0-5]|2[0-4]\d|1?\d?\d)){3}": "IPv4",
    r"v?\d{1,3}\.\d{1,3}\.\d{1,3}(-(alpha|beta)\.\d)?": "version",
    r"[A-ZÄÖÜ][a-zäöüß]{1,12}(-[A-ZÄÖÜ][a-zäöüß]{1,12})?": "name",
}
SUMS = 'root ::= term (" + " term)*\nterm ::= [0-9]{1,3} | "(" root ")"'
SUMS_AS_LARK = 'start: term (" + " term)*\nterm: /[0-9]{1,3}/ | "(" start ")"'

pytestmark = pytest.mark.deep


def said(grammars: list[Grammar], most: int) -> list[str | None]:
    """Return an answer for each grammar, at temperature 1.5; None if it did not end by itself."""
    with Engine(TINY, max_total_tokens=32768) as engine:
        params = [
            SamplingParams(temperature=1.5, seed=seed, max_new_tokens=most, grammar=grammar)
            for seed, grammar in enumerate(grammars)
        ]
        outputs = engine.generate(["Answer with an example: "] * len(grammars), params)
    return [output.text if output.finish and output.finish.type == "stop" else None for output in outputs]


def taken(schemas: list[Any]) -> list[Any]:
    """Return the schemas that are accepted."""
    backend, found = Backends(tiny_vocabulary()), []
    for schema in schemas:
        with contextlib.suppress(GrammarError):
            backend.compile(Grammar("json", json.dumps(schema)))
            found.append(schema)
    return found


@pytest.mark.timeout(3600)
def test_answers_are_valid_by_jsonschema() -> None:
    schemas = taken([Generator(seed).schema() for seed in range(7_000_000, 7_000_000 + COUNT)])
    assert len(schemas) > 0.6 * COUNT
    answers = said([Grammar("json", json.dumps(schema)) for schema in schemas], 160)
    for schema, answer in zip(schemas, answers, strict=True):
        if answer is not None:
            error = next(judge(schema).iter_errors(parse(answer)), None)
            assert error is None, f"{answer!r} is no {json.dumps(schema)}: {error}"
    assert sum(answer is not None for answer in answers) > 0.4 * len(schemas)


def test_answers_match_by_re() -> None:
    patterns = [pattern for pattern in PATTERNS for _ in range(6)]
    answers = said([Grammar("regex", pattern) for pattern in patterns], 200)
    ended = [(pattern, answer) for pattern, answer in zip(patterns, answers, strict=True) if answer is not None]
    assert {pattern for pattern, _ in ended} == set(PATTERNS)
    for pattern, answer in ended:
        assert re.fullmatch(pattern, answer), f"{answer!r} is no {PATTERNS[pattern]}"


def test_answers_parse_by_lark() -> None:
    parser = Lark(SUMS_AS_LARK, parser="earley")
    answers = [answer for answer in said([Grammar("ebnf", SUMS)] * 20, 100) if answer is not None]
    assert len(answers) > 5
    for answer in answers:
        parser.parse(answer)
