"""What a request may say next where that depends on what it has said: the sampling loop's side of a grammar."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch

logger = logging.getLogger(__name__)


class Filler(Protocol):
    """Says what constraints allow, those of one kind together."""

    def fill(self, constraints: Sequence[Any], masks: torch.Tensor, rows: Sequence[int]) -> None:
        """masks (rows, words) int32 of zeros on the CPU: in row rows[i], set bit j % 32 of word j // 32 where token j
        is what constraints[i] allows next. Bits beyond the vocabulary mean nothing."""


class Constraint(Protocol):
    """One request's, at the place that its output has come to. Used by the scheduler's thread alone.

    It is told of a token when the request takes it, not when it is sampled. What a step samples for a request that has
    ended meanwhile it never hears of, and a retracted request keeps its tokens, so nothing has to be taken back.
    """

    @property
    def filler(self) -> Filler:
        """Who says what it allows. What that raises for it alone ends the request, as with `accept`."""

    def accept(self, token: int) -> None:
        """The output is longer by `token`. Raises where that is not allowed; that ends the request, with an error."""

    @property
    def finished(self) -> bool:
        """Nothing may follow: the request is done, without a token that says so."""


def mask_words(vocab_size: int) -> int:
    """32-bit words of a mask."""
    return -(-vocab_size // 32)


def fill_masks(
    constraints: Sequence[Constraint], vocab_size: int, device: torch.device
) -> tuple[torch.Tensor, dict[int, str]]:
    """→ (constraints, words) int32 of `Ops.forbid`, on its way to the device; which ones failed, and why: their rows
    mean nothing."""
    on_cuda = device.type == "cuda"
    masks = torch.zeros(len(constraints), mask_words(vocab_size), dtype=torch.int32, pin_memory=on_cuda)
    rows_of: dict[Filler, list[int]] = {}
    for i, constraint in enumerate(constraints):
        rows_of.setdefault(constraint.filler, []).append(i)
    failed = dict[int, str]()
    for filler, rows in rows_of.items():
        failed |= _fill(filler, constraints, masks, rows)
    return masks.to(device, non_blocking=True), failed


def _fill(filler: Filler, constraints: Sequence[Constraint], masks: torch.Tensor, rows: list[int]) -> dict[int, str]:
    """All at once; if that fails, row by row. → those for which it does, and why."""
    try:
        filler.fill([constraints[i] for i in rows], masks, rows)
    except Exception as error:
        if len(rows) > 1:
            masks[rows] = 0
            return {i: why for row in rows for i, why in _fill(filler, constraints, masks, [row]).items()}
        logger.exception("a constraint could not say what it allows")
        return {rows[0]: f"internal error: {error!r}"}
    return {}
