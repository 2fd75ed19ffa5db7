"""How much memory requests will need: plain numbers, no state but the ratio."""

from __future__ import annotations

from collections.abc import Iterable

from treeline_runtime.core import Req

INITIAL_RATIO = 0.7
MIN_RATIO_FACTOR = 0.14
DECAY_STEPS = 600
RETRACT_STEPS = 20
OUTPUT_CLIP_TOKENS = 4096
"""No request is expected to produce more from now on: users ask for large maxima and rarely get there."""


class NewTokenRatio:
    """The share of its remaining allowed output that a running request is expected to produce.

    Starts high, decays while all goes well, and jumps to what was really produced when requests had to be retracted.
    """

    def __init__(self, conservativeness: float = 1.0) -> None:
        self.initial = min(1.0, INITIAL_RATIO * conservativeness)
        self.minimum = self.initial * MIN_RATIO_FACTOR
        self.value = self.initial
        self._decay = (self.initial - self.minimum) / DECAY_STEPS

    def on_decode(self) -> None:
        self.value = max(self.value - self._decay, self.minimum)

    def on_retract(self, running: Iterable[Req]) -> None:
        """`running`: those that stay."""
        decoded = allowed = count = 0
        for req in running:
            decoded += req.output_len
            allowed += req.max_new_tokens
            count += 1
        self.value = min(1.0, (decoded + RETRACT_STEPS * count) / (allowed + 1))

    def on_idle(self) -> None:
        self.value = self.initial


def remaining_tokens(req: Req) -> int:
    return min(req.max_new_tokens - req.output_len, OUTPUT_CLIP_TOKENS)


def reserved_pages(reqs: Iterable[Req], ratio: float, page_size: int) -> int:
    """Pages that admitted requests are expected to take beyond what they hold: rest of the prompt, and output."""
    total = 0
    for req in reqs:
        share = 1.0 if req.sampling.ignore_eos else ratio
        expected = max(len(req.tokens) - req.num_pages * page_size, 0) + int(remaining_tokens(req) * share)
        total += -(-expected // page_size)
    return total


def cost_pages(req: Req, matched_tokens: int, page_size: int) -> int:
    """Pages that admitting `req` may take in the end: its uncached tokens and all its output, and one to spare."""
    return -(-(len(req.tokens) - matched_tokens + remaining_tokens(req)) // page_size) + 1
