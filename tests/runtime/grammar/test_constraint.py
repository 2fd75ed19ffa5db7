"""A request's grammar forgets guesses, also those that end what comes before it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.runtime_grammars import Compiler, bundle, compiled
from tokenizers import Tokenizer
from treeline_runtime.grammar.constraint import GrammarConstraint
from treeline_runtime.messages import Grammar
from treeline_runtime.sampling import Masks

GRAMMAR = Grammar("regex", "(yes|no)( and (yes|no))*")
TEXT = "Well, </thin, </think>yes and no and yes and yes and no and no and yes"


def begun() -> GrammarConstraint:
    return Compiler().constraint(compiled(GRAMMAR), stop_ids=(), after="</think>")


def state(constraint: GrammarConstraint) -> tuple[list[int], int, bool]:
    """Return what it allows next, how much of it a jump may take back, and whether the grammar has not begun."""
    masks, failed = Masks(4096, torch.device("cpu")).fill([constraint], [()])
    assert failed == {}
    return masks[0].tolist(), constraint.reversible, constraint.waits


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12))))
def test_tokens_that_are_taken_back_leave_no_trace(moves: list[tuple[int, int]]) -> None:
    tokenizer = Tokenizer.from_str(bundle().tokenizer_json)
    head, tail = (tokenizer.encode(text, add_special_tokens=False).ids for text in TEXT.rsplit("</think>", 1))
    ids = [*head, *tokenizer.encode("</think>", add_special_tokens=False).ids, *tail]
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
