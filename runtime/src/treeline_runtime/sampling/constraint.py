"""The interface of constraints, such as grammars, to the sampling loop."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch

logger = logging.getLogger(__name__)

MAX_DRAFT = 32
"""The most guessed tokens of a sequence in a step."""
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
    request, and a retracted request keeps its tokens. Tokens are taken back only by a jump (`scheduler.grammars`) that
    spells the same text otherwise, and where it was asked what would follow guesses.
    """

    @property
    def filler(self) -> Filler:
        """Fills its masks. An exception for it alone ends the request, as with `accept`."""

    def accept(self, token: int) -> None:
        """Appends `token`. Raises if it is not allowed, which ends the request with an error."""

    @property
    def finished(self) -> bool:
        """Whether nothing may follow: the request ends without an end token."""

    allows_guesses: bool
    """Whether it is asked what would follow guesses; no more once that took too much work."""

    def forced(self) -> str:
        """The text that must come next, as far as it is certain."""

    @property
    def reversible(self) -> int:
        """The number of last tokens that a jump can take back."""

    def rollback(self, count: int) -> None:
        """Shortens the output by so many tokens: reversible ones, or at most MAX_DRAFT."""


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

    def fill(
        self, constraints: Sequence[Constraint], drafts: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, dict[int, str]]:
        """drafts: for each constraint tokens that it allows, which may follow.

        Returns masks for `Ops.forbid`, (rows, words) int32 on the host: for each constraint a row, and one after each
        of its draft's tokens; and why rows failed, which are meaningless.
        """
        each = [
            constraint for constraint, draft in zip(constraints, drafts, strict=True) for _ in range(1 + len(draft))
        ]
        firsts = [0, *accumulate(1 + len(draft) for draft in drafts)]
        if self._device.type == "cuda":
            masks = self._buffer(len(each))[: len(each)].zero_()
        else:
            masks = torch.zeros(len(each), self._words, dtype=torch.int32)
        failed, taken = dict[int, str](), [0] * len(constraints)
        for depth in range(1 + max(map(len, drafts), default=0)):
            rows_of: dict[Filler, list[int]] = {}
            for i, (constraint, draft) in enumerate(zip(constraints, drafts, strict=True)):
                if depth > len(draft):
                    continue
                row = firsts[i] + depth
                try:
                    if depth and taken[i] == depth - 1:
                        constraint.accept(draft[taken[i]])
                        taken[i] = depth
                except Exception as error:  # all at once it was too much work
                    failed |= dict.fromkeys(range(row, firsts[i + 1]), f"internal error: {error!r}")
                if taken[i] == depth:
                    rows_of.setdefault(constraint.filler, []).append(row)
            for filler, rows in rows_of.items():
                failed |= _fill(filler, each, masks, rows)
        for constraint, count in zip(constraints, taken, strict=True):
            if count:
                constraint.rollback(count)
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
