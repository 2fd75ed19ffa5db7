"""What a request may say next where that depends on what it has said: the sampling loop's side of a grammar."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

logger = logging.getLogger(__name__)


class Constraint(Protocol):
    """One request's, at the place that its output has come to. Used by the scheduler's thread alone.

    It is told of a token when the request takes it, not when it is sampled. What a step samples for a request that has
    ended meanwhile it never hears of, and a retracted request keeps its tokens, so nothing has to be taken back.
    """

    def accept(self, token: int) -> None:
        """The output is longer by `token`. Raises where that is not allowed; that ends the request, with an error."""

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        """row (words,) of zeros, not to be kept: set bit i % 32 of word i // 32 where token i is allowed next. Bits
        beyond the vocabulary mean nothing. What is raised ends the request, as with `accept`."""

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
    failed = {}
    for i, (constraint, row) in enumerate(zip(constraints, masks.numpy(), strict=True)):
        try:
            constraint.fill(row)
        except Exception as error:
            logger.exception("a constraint could not say what it allows")
            failed[i] = f"internal error: {error!r}"
    return masks.to(device, non_blocking=True), failed
