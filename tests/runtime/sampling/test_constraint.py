"""Masks that constraints fill, and the logits that remain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.runtime_constraints import Toy, only
from treeline_runtime.ops.torch_ops import TorchOps
from treeline_runtime.sampling import Masks
from treeline_runtime.sampling.constraint import Filler

CPU = torch.device("cpu")


@given(
    st.integers(1, 100).flatmap(lambda vocab: st.tuples(st.just(vocab), st.lists(st.sets(st.integers(0, vocab - 1)))))
)
def test_remaining_logits_are_those_that_the_constraints_allow(case: tuple[int, list[set[int]]]) -> None:
    vocab, allowed = case
    masks, failed = Masks(vocab, CPU).fill(
        [Toy(lambda _, tokens=tokens: tokens) for tokens in allowed],  # type: ignore[misc]
        [()] * len(allowed),
    )
    assert failed == {}
    logits = torch.arange(len(allowed) * vocab, dtype=torch.float32).view(-1, vocab)
    before = logits.clone()
    TorchOps().forbid(logits, masks)
    for row, was, tokens in zip(logits, before, allowed, strict=True):
        for token in range(vocab):
            assert row[token] == (was[token] if token in tokens else -torch.inf)


class Full:
    """A constraint that sets more bits than there are tokens, as grammars do whose tokenizer and model differ in
    size."""

    finished = False

    @property
    def filler(self) -> Filler:
        return self

    def accept(self, token: int) -> None:
        raise AssertionError(token)

    def fill(self, constraints: Sequence[Any], masks: torch.Tensor, rows: Sequence[int]) -> None:
        masks[rows] = -1


def test_bits_beyond_the_vocabulary_mean_nothing() -> None:
    masks, _ = Masks(40, CPU).fill([Full()], [()])
    logits = torch.zeros(1, 40)
    TorchOps().forbid(logits, masks)
    assert logits.tolist() == [[0.0] * 40]


def test_forbidden_nan_is_masked() -> None:
    masks, _ = Masks(4, CPU).fill([Toy(only(2))], [()])
    logits = torch.tensor([[torch.nan, torch.inf, 1.0, torch.nan]])
    TorchOps().forbid(logits, masks)
    assert logits.tolist() == [[-torch.inf, -torch.inf, 1.0, -torch.inf]]
