"""The interface of constraints, such as grammars, to the sampling loop."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch

logger = logging.getLogger(__name__)

_IN_FLIGHT = 3
"""Steps with masks in flight: one is filled, one may be copied, one is read."""


class Filler(Protocol):
    """Fills masks for constraints of one kind together."""

    def fill(self, constraints: Sequence[Any], masks: torch.Tensor, rows: Sequence[int]) -> None:
        """masks (rows, words) int32 of zeros on the CPU: in row rows[i], sets bit j % 32 of word j // 32 if
        constraints[i] allows token j next. Bits beyond the vocabulary are ignored."""


class Constraint(Protocol):
    """A request's constraint at its output's position. Only the scheduler's thread uses it.

    It gets a token when the request takes it, not when it is sampled. So it never sees tokens sampled for an ended
    request, and a retracted request keeps its tokens; only a jump (`scheduler.grammars`) that spells the same text in
    other tokens takes some back.
    """

    @property
    def filler(self) -> Filler:
        """Fills its masks. An exception for it alone ends the request, as with `accept`."""

    def accept(self, token: int) -> None:
        """Appends `token`. Raises if it is not allowed, which ends the request with an error."""

    @property
    def finished(self) -> bool:
        """Whether nothing may follow: the request ends without an end token."""

    def forced(self) -> str:
        """The text that must come next, as far as it is certain."""

    @property
    def reversible(self) -> int:
        """The number of last tokens that can be taken back."""

    def rollback(self, count: int) -> None:
        """Shortens the output by so many tokens."""


def mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


class Masks:
    """Host memory for masks, reused from step to step, and their copies on the device.

    On CUDA the memory is page-locked. Locking waits for the device, so it is done once. A step's copy waits behind its
    forward pass, so later steps fill other memory.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._words = mask_words(vocab_size)
        self._device = device
        self._buffers: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self._next = 0

    def fill(self, constraints: Sequence[Constraint]) -> tuple[torch.Tensor, dict[int, str]]:
        """(constraints, words) int32 for `Ops.forbid`, on the host, and why some failed; their rows are meaningless."""
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
        """The last `fill` on the device."""
        if self._device.type != "cuda":
            return masks
        there = masks.to(self._device, non_blocking=True)
        self._buffers[self._next][1].record()
        return there

    def _buffer(self, rows: int) -> torch.Tensor:
        """The least recently used buffer, once it is copied; enlarged if needed."""
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
    """Fills all at once, and if that fails row by row. Returns the failing ones and why."""
    try:
        filler.fill([constraints[i] for i in rows], masks, rows)
    except Exception as error:
        if len(rows) > 1:
            masks[rows] = 0
            return {i: why for row in rows for i, why in _fill(filler, constraints, masks, [row]).items()}
        logger.exception("a constraint could not fill its mask")
        return {rows[0]: f"internal error: {error!r}"}
    return {}
