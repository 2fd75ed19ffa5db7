"""Stop patterns match where `re.search` does, in bounded time for any pattern."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from treeline_runtime.grammar.backend import GrammarError
from treeline_runtime.stop_regex import MAX_POSITIONS, Automaton, RegexFinder

PATTERNS = [
    "a+b",
    "(a|b)*c",
    "^ab",
    "b$",
    "^a?$",
    "a{2,3}b",
    "(ab?){2}",
    "[^a]c",
    "",
    "(?i)AB",
    "a.c",
    "(a+)+c",
    "(|a)b",
]


@given(st.sampled_from(PATTERNS), st.lists(st.text("abc\n", max_size=3), max_size=8))
def test_a_text_in_pieces_matches_where_re_does(pattern: str, pieces: list[str]) -> None:
    finder, text = RegexFinder((pattern,)), ""
    for piece in pieces:
        text += piece
        # `$` is the very end of the text, as in ECMAScript: not before a last newline
        found = re.search(pattern.replace("$", r"\Z"), text) is not None
        assert (finder.feed(piece) == pattern) is found


def test_the_first_matching_pattern_is_reported_and_ignored_matches_are_searched_again() -> None:
    finder = RegexFinder(("x+", "[xy]"))
    assert finder.feed("y", ignore=True) is None
    assert finder.feed("-") is None
    assert finder.feed("y") == "[xy]"
    assert RegexFinder(("b", "a")).feed("ab") == "b"


@pytest.mark.parametrize(
    "pattern", [r"(a)\1", "(?=a)", r"\bword\b", "(", "a{300}", "(a{100}){100}", "(" * 2000 + ")" * 2000]
)
def test_irregular_and_too_large_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(GrammarError):
        Automaton(pattern)


def test_a_character_takes_bounded_steps_even_for_a_backtracking_pattern() -> None:
    hostile = Automaton("(a|a?)+" * 60 + "b")
    assert len(hostile._next) <= MAX_POSITIONS
    state = hostile.start
    for _ in range(1000):
        state = hostile.feed(state, "a" * 100)
    assert not state[1]
    assert hostile._after.cache_info().misses < 500, "each set of positions is computed once"
    assert hostile.feed(state, "b")[1]
