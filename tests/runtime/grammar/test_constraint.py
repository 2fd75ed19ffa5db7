"""A request's grammar forgets guesses, also those that end what comes before it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.runtime_grammars import Compiler, bundle, compiled, vocabulary
from tokenizers import Tokenizer
from treeline_runtime.grammar.constraint import GrammarConstraint
from treeline_runtime.grammar.xgrammar_backend import XGrammarMatcher
from treeline_runtime.messages import Grammar
from treeline_runtime.sampling import Masks

GRAMMAR = Grammar("regex", "(yes|no)( and (yes|no))*")
TEXT = "Well, </thin, </think>yes and no and yes and yes and no and no and yes"


def tokens_of(text: str) -> list[int]:
    return Tokenizer.from_str(bundle().tokenizer_json).encode(text, add_special_tokens=False).ids


def begun() -> GrammarConstraint:
    return Compiler().constraint(compiled(GRAMMAR), stop_ids=(), after="</think>")


def state(constraint: GrammarConstraint) -> tuple[list[int], int, bool]:
    """Return what it allows next, how much of it a jump may take back, and whether the grammar has not begun."""
    masks, failed = Masks(4096, torch.device("cpu")).fill([constraint], [()])
    assert failed == {}
    return masks[0].tolist(), constraint.reversible, constraint.waits


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12))))
def test_tokens_that_are_taken_back_leave_no_trace(moves: list[tuple[int, int]]) -> None:
    head, tail = map(tokens_of, TEXT.rsplit("</think>", 1))
    ids = [*head, *tokens_of("</think>"), *tail]
    constraint, known = begun(), 0
    for forward, back in moves:
        more = ids[known : known + forward]
        for token in more:
            constraint.accept(token)
        constraint.rollback(min(back, len(more)))
        known += len(more) - min(back, len(more))
        fresh = begun()
        for token in ids[:known]:
            fresh.accept(token)
        assert state(constraint) == state(fresh)


STOP = [next(id for id, text in enumerate(vocabulary().texts) if not text)]
EBNF = Grammar("ebnf", 'root ::= ("red" | "green" | "blue") (", " [a-f] [a-f] [a-f])*')


@pytest.mark.parametrize("masked", [True, False])
def test_guesses_that_are_too_much_work_leave_the_grammar_as_it_was(
    monkeypatch: pytest.MonkeyPatch, masked: bool
) -> None:
    known, guesses = (tokens_of(text) for text in ("green", ", abc, def"))
    constraint, fresh = (Compiler().constraint(compiled(EBNF), stop_ids=STOP) for _ in range(2))
    for token in known:
        constraint.accept(token)
        fresh.accept(token)
    assert isinstance(constraint.matcher, XGrammarMatcher)
    if not masked:
        constraint.accept(guesses[0])
        constraint.matcher.slow = True
        constraint.rollback(1)
    else:

        def fill(_: object, __: object, rows: list[int]) -> None:
            assert isinstance(constraint.matcher, XGrammarMatcher)
            constraint.matcher.slow = rows != [0]

        with monkeypatch.context() as patch:
            patch.setattr(constraint.filler, "fill", fill)
            Masks(4096, torch.device("cpu")).fill([constraint], [guesses])
    assert not constraint.gave_up
    assert not constraint.allows_guesses
    assert state(constraint) == state(fresh)
