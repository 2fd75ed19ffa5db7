"""Masks as constraints fill them, and what they leave of logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.runtime_constraints import Toy, only
from treeline_runtime.ops.torch_ops import TorchOps
from treeline_runtime.sampling import fill_masks, mask_words
from treeline_runtime.sampling.constraint import Filler

CPU = torch.device("cpu")


@pytest.mark.parametrize(("vocab", "words"), [(1, 1), (31, 1), (32, 1), (33, 2), (4096, 128), (151_669, 4740)])
def test_there_is_a_bit_for_every_token(vocab: int, words: int) -> None:
    assert mask_words(vocab) == words


@given(
    st.integers(1, 100).flatmap(lambda vocab: st.tuples(st.just(vocab), st.lists(st.sets(st.integers(0, vocab - 1)))))
)
def test_what_is_left_is_what_the_constraints_allow(case: tuple[int, list[set[int]]]) -> None:
    vocab, allowed = case
    masks, failed = fill_masks([Toy(lambda _, tokens=tokens: tokens) for tokens in allowed], vocab, CPU)  # type: ignore[misc]
    assert failed == {}
    logits = torch.arange(len(allowed) * vocab, dtype=torch.float32).view(-1, vocab)
    before = logits.clone()
    TorchOps().forbid(logits, masks)
    for row, was, tokens in zip(logits, before, allowed, strict=True):
        for token in range(vocab):
            assert row[token] == (was[token] if token in tokens else -torch.inf)


class Full:
    """Says more than there are tokens, as grammars do whose tokenizer is larger than the model or smaller."""

    finished = False

    @property
    def filler(self) -> Filler:
        return self

    def accept(self, token: int) -> None:
        raise AssertionError(token)

    def fill(self, constraints: Sequence[Any], masks: torch.Tensor, rows: Sequence[int]) -> None:
        masks[rows] = -1


def test_bits_beyond_the_vocabulary_mean_nothing() -> None:
    masks, _ = fill_masks([Full()], 40, CPU)
    logits = torch.zeros(1, 40)
    TorchOps().forbid(logits, masks)
    assert logits.tolist() == [[0.0] * 40]


def test_nan_that_is_forbidden_is_gone() -> None:
    masks, _ = fill_masks([Toy(only(2))], 4, CPU)
    logits = torch.tensor([[torch.nan, torch.inf, 1.0, torch.nan]])
    TorchOps().forbid(logits, masks)
    assert logits.tolist() == [[-torch.inf, -torch.inf, 1.0, -torch.inf]]


def test_one_that_fails_is_named_and_the_others_are_filled() -> None:
    masks, failed = fill_masks([Toy(only(0)), Toy(only(1), fails="fill"), Toy(only(33))], 64, CPU)
    assert masks[[0, 2]].tolist() == [[1, 0], [0, 2]]
    assert failed == {1: "internal error: RuntimeError('fill fails as told')"}
