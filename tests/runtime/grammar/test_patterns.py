"""Regular expressions mean what `re` says, alone, in JSON and in a tag, or are refused by name."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from treeline_runtime.grammar.backend import GrammarBackend, GrammarError
from treeline_runtime.grammar.backends import Backends
from treeline_runtime.grammar.formats import FORMATS
from treeline_runtime.grammar.patterns import as_regex, within
from treeline_runtime.grammar.vocabulary import Vocabulary
from treeline_runtime.messages import Grammar

END = 256
BYTES = Vocabulary([bytes([i]) for i in range(256)] + [b""], {}, (END,))


@pytest.fixture(scope="module")
def backend() -> GrammarBackend:
    return Backends(BYTES)


def _in_tag(content: dict[str, Any]) -> Grammar:
    return Grammar("structural_tag", json.dumps({"format": content}))


def _regex(pattern: str, *, tag: bool) -> Grammar:
    return _in_tag({"type": "regex", "pattern": pattern}) if tag else Grammar("regex", pattern)


def _schema(schema: dict[str, Any], *, tag: bool) -> Grammar:
    content = {"type": "json_schema", "json_schema": schema}
    return _in_tag(content) if tag else Grammar("json", json.dumps(schema))


def _takes(backend: GrammarBackend, grammar: Grammar, texts: list[str]) -> list[bool]:
    compiled = backend.load(backend.compile(grammar))
    found = []
    for text in texts:
        matcher = compiled.matcher([END])
        found.append(all(matcher.accept(byte) for byte in text.encode()) and matcher.completed)
    return found


EVERYDAY = {
    r"\d{4}-\d{2}-\d{2}": ["2024-01-31", "2024-1-31", "20240131", "٢٠٢٤-01-31"],
    r"[\w.+-]+@[\w-]+\.[\w.]+": ["a.b+c@d-e.org", "a@b", "@b.c", "a b@c.d"],
    r"(?:25[0-5]|2[0-4]\d|1?\d?\d)(?:\.(?:25[0-5]|2[0-4]\d|1?\d?\d)){3}": ["127.0.0.1", "256.1.1.1", "1.2.3"],
    r"\+?\d{1,3}[\s-]?\(?\d{3}\)?[\s-]?\d{4}": ["+49 (555) 1234", "15551234", "+1-555-12345", "x"],
    r"https?://[^\s/$.?#].[^\s]*": ["http://a.bc/d?e", "https://éa", "ftp://a.b", "http:// a"],
    r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}": ["123e4567-e89b-12d3-a456-426614174000", "123e4567"],
    r"v?(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(?:-[\da-z.-]+)?": ["v1.2.3", "1.0.0-rc.1", "01.2.3", "1.2"],
    r"\d{3}": ["123", "12", "1234", "12a"],
    r"^(yes|no)$": ["yes", "no", "yesno", ""],
    r"#(?i:[0-9a-f]{6})": ["#FFaa00", "#ffff", "#gggggg"],
    r"\$\d+(?:\.\d\d)?": ["$5", "$5.99", "$5.9", "5"],
    r"[^\W\d_]+": ["abc", "a1", "_", "é"],
    r"\x41\u0042\t": ["AB\t", "AB", "x41"],
    r"a\/b\-c\.d": ["a/b-c.d", "a/b-cxd"],
    r"(?s:a.b)|c.d": ["a\nb", "c\nd", "cxd"],
    r"(?P<y>\d\d)(?<m>\d\d)": ["2401", "24"],
    r"a|": ["a", "", "b"],
    r"[]a^-]+": ["]a^-", "b"],
    r"(a{2,3}){2}": ["aaaa", "aaaaaa", "aaa", "aaaaaaa"],
    r"\S+\s\S+": ["a b", "a  b", "a\u00a0b"],
}


@pytest.mark.parametrize("tag", [False, True])
@pytest.mark.parametrize("pattern", EVERYDAY)
def test_everyday_patterns_match_like_re_in_ascii(backend: GrammarBackend, pattern: str, tag: bool) -> None:
    texts = EVERYDAY[pattern]
    readable = pattern.replace("(?<m>", "(?P<m>")
    expected = [bool(re.fullmatch(readable, text, re.ASCII) and re.fullmatch(readable, text)) for text in texts]
    assert _takes(backend, _regex(pattern, tag=tag), texts) == expected
    assert any(expected)
    assert len(texts) == 1 or not all(expected)


def _pattern(draw: random.Random, depth: int) -> str:
    share = draw.random()
    if depth <= 0 or share < 0.35:
        atoms = ["a", "b", "1", "é", "[ab]", "[^a]", r"\d", r"\.", ".", r"\^", r"[\^-b]", r"[^\^]", r"[\]\-a]", r"\w"]
        return draw.choice(atoms)
    if share < 0.6:
        return "".join(_pattern(draw, depth - 1) for _ in range(draw.randint(1, 3)))
    if share < 0.75:
        return "(" + "|".join(draw.choice([_pattern(draw, depth - 1)] * 6 + [""]) for _ in range(2)) + ")"
    inner = _pattern(draw, depth - 1)
    return f"(?:{inner})" + draw.choice(["?", "*", "+", "{2}", "{0,2}", "{1,3}", "{2,}", "*?", "??"])


@pytest.mark.parametrize("tag", [False, True])
@pytest.mark.parametrize("kind", ["regex", "json"])
def test_random_patterns_match_like_re(backend: GrammarBackend, kind: str, tag: bool) -> None:
    """It includes texts that xgrammar's own automata would accept in the middle of an optional part."""
    taken = 0
    for seed in range(150):
        draw = random.Random(seed)
        pattern = _pattern(draw, 3)
        texts = ["".join(draw.choices("aab1.^-é", k=draw.randint(0, 4))) for _ in range(25)]
        expected = [bool(re.fullmatch(pattern, text, re.ASCII)) for text in texts]
        taken += sum(expected)
        if kind == "regex":
            assert _takes(backend, _regex(pattern, tag=tag), texts) == expected, pattern
        else:
            grammar = _schema({"type": "string", "pattern": f"^(?:{pattern})$"}, tag=tag)
            quoted = [json.dumps(text, ensure_ascii=False) for text in texts]
            assert _takes(backend, grammar, quoted) == expected, pattern
    assert taken > 300


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("^x-", ["x-", "x-y", "ax-"]),
        ("b", ["abc", "b", "ac"]),
        ("[0-9]$", ["a1", "1a"]),
        ("^a|b$", ["ax", "xb", "xax"]),
        ("(^a|b)c$", ["ac", "xbc", "xac"]),
    ],
)
def test_a_pattern_of_a_schema_may_match_anywhere(backend: GrammarBackend, pattern: str, texts: list[str]) -> None:
    expected = [bool(re.search(pattern, text)) for text in texts]
    for tag in (False, True):
        grammar = _schema({"type": "string", "pattern": pattern}, tag=tag)
        assert _takes(backend, grammar, [f'"{text}"' for text in texts]) == expected


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        (r"(?=a)a", "a lookaround"),
        (r"(?<!a)b", "a lookaround"),
        (r"(a)\1", "a backreference"),
        (r"(?P<x>a)(?P=x)", "a backreference"),
        (r"(a)?(?(1)b|c)", "a condition"),
        (r"\bfoo\b", "a word boundary"),
        (r"a++", "a possessive quantifier"),
        (r"(?>a|ab)c", "an atomic group"),
        (r"(?m)^a$", "the flag m with an anchor"),
        (r"a^b", "at its ends"),
        (r"(^a)*", "at its ends"),
        (r"[^\s\S]", "a set without characters"),
        (r"\p{L}", r"bad escape \p"),
        (r"[", "unterminated character set"),
        (r"a**", "multiple repeat"),
        ("(" * 5000 + ")" * 5000, "nested too deeply"),
        ("(?:x" * 280 + ")+y" * 280, "nested too deeply"),
    ],
)
def test_irregular_patterns_are_refused_by_name(backend: GrammarBackend, pattern: str, name: str) -> None:
    for tag in (False, True):
        for grammar in (_regex(pattern, tag=tag), _schema({"pattern": pattern}, tag=tag)):
            with pytest.raises(GrammarError, match=re.escape(name)):
                backend.compile(grammar)


@pytest.mark.parametrize("name", FORMATS)
def test_format_patterns_are_rewritten_as_re_reads_them(name: str) -> None:
    draw = random.Random(1)
    written = as_regex(within(FORMATS[name]))
    for _ in range(300):
        text = "".join(draw.choices("2024-01-31T12:59:09Z.@a/é", k=draw.randint(1, 24)))
        assert bool(re.fullmatch(written, text)) == bool(re.search(FORMATS[name], text, re.ASCII))


@given(st.text("ax9-.", max_size=12))
def test_a_hostname_has_no_invalid_punycode_label(text: str) -> None:
    labels = text.split(".")
    plain = all(re.fullmatch("[a-z0-9]([a-z0-9-]*[a-z0-9])?", label) and label[2:4] != "--" for label in labels)
    assert bool(re.fullmatch(FORMATS["hostname"], text)) == (plain and len(labels) <= 6)
