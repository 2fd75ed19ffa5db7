"""What a request may say next where that depends on what it has said: the sampling loop's side of a grammar."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch

logger = logging.getLogger(__name__)

_IN_FLIGHT = 3
"""Masks of so many steps: one is filled, one may be copied, one is read."""


class Filler(Protocol):
    """Says what constraints allow, those of one kind together."""

    def fill(self, constraints: Sequence[Any], masks: torch.Tensor, rows: Sequence[int]) -> None:
        """masks (rows, words) int32 of zeros on the CPU: in row rows[i], set bit j % 32 of word j // 32 where token j
        is what constraints[i] allows next. Bits beyond the vocabulary mean nothing."""


class Constraint(Protocol):
    """One request's, at the place that its output has come to. Used by the scheduler's thread alone.

    It gets a token when the request takes it, not when it is sampled. It never sees what a step samples for a request
    that has ended meanwhile, and a retracted request keeps its tokens; so nothing has to be taken back but where a jump
    (`scheduler.grammars`) says the same text in other tokens.
    """

    @property
    def filler(self) -> Filler:
        """Who says what it allows. What that raises for it alone ends the request, as with `accept`."""

    def accept(self, token: int) -> None:
        """The output is longer by `token`. Raises where that is not allowed; that ends the request, with an error."""

    @property
    def finished(self) -> bool:
        """Nothing may follow: the request is done, without a token that says so."""

    def forced(self) -> str:
        """The text that must come next, as far as it is certain."""

    @property
    def reversible(self) -> int:
        """So many of the last tokens can be taken back."""

    def rollback(self, count: int) -> None:
        """The output is shorter by so many tokens."""


def mask_words(vocab_size: int) -> int:
    """32-bit words of a mask."""
    return -(-vocab_size // 32)


class Masks:
    """Masks on their way to the device, from memory that is kept.

    On CUDA this is page-locked memory. To lock pages waits for whatever the device computes, so it is done once; and
    the copy of a step waits behind its forward pass, so the next steps fill other memory meanwhile.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._words = mask_words(vocab_size)
        self._device = device
        self._buffers: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self._next = 0

    def fill(self, constraints: Sequence[Constraint]) -> tuple[torch.Tensor, dict[int, str]]:
        """→ (constraints, words) int32 of `Ops.forbid`, on the host; which ones failed, and why: their rows mean
        nothing."""
        if self._device.type == "cuda":
            masks = self._buffer(len(constraints))[: len(constraints)].zero_()
        else:
            masks = torch.zeros(len(constraints), self._words, dtype=torch.int32)
        rows_of: dict[Filler, list[int]] = {}
        for i, constraint in enumerate(constraints):
            rows_of.setdefault(constraint.filler, []).append(i)
        failed = dict[int, str]()
        for filler, rows in rows_of.items():
            failed |= _fill(filler, constraints, masks, rows)
        return masks, failed

    def on_device(self, masks: torch.Tensor) -> torch.Tensor:
        """What the last `fill` gave."""
        if self._device.type != "cuda":
            return masks
        there = masks.to(self._device, non_blocking=True)
        self._buffers[self._next][1].record()
        return there

    def _buffer(self, rows: int) -> torch.Tensor:
        """The one that was used longest ago, once it is copied; larger than before if need be."""
        if not self._buffers or len(self._buffers[0][0]) < rows:
            torch.cuda.synchronize(self._device)
            size = 1 << (rows - 1).bit_length()
            self._buffers = [
                (torch.zeros(size, self._words, dtype=torch.int32, pin_memory=True), torch.cuda.Event())
                for _ in range(_IN_FLIGHT)
            ]
        self._next = (self._next + 1) % _IN_FLIGHT
        kept, copied = self._buffers[self._next]
        copied.synchronize()
        return kept


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
