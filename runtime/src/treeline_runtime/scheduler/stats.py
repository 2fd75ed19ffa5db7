"""What the scheduler measures of itself."""

from __future__ import annotations

FORGET = 0.9
"""Weight of the past when a new measurement comes."""


class SchedulerStats:
    """Prefill rate over busy time, as a token of a long prompt sees it; duration of a decode step. Times in seconds.

    A step of few tokens takes nearly as long as one of none, so that its rate says little of the speed: a step counts
    by its tokens, and makes the past be forgotten by its tokens, too, beside the mean of those that count. Else an
    engine would look slow for finding prompts in its cache, and get no new ones, and never be measured again.

    The first of each counts in the totals and says nothing of the speed: it pays for what is done once (memory that is
    touched, kernels that are built). A picker that believed it would leave the pod alone, and never learn better.
    """

    def __init__(self) -> None:
        self.total_prefill_tokens = 0
        self.total_prefill_busy_us = 0
        self.total_jumps = 0
        self.total_forced_tokens = 0
        self._tokens = 0.0  # sums over steps: tokens,
        self._squares = 0.0  # tokens × tokens,
        self._busy = 0.0  # tokens × seconds
        self._decode = 0.0
        self._prefilled = self._decoded = False

    def on_prefill(self, tokens: int, seconds: float) -> None:
        self.total_prefill_tokens += tokens
        self.total_prefill_busy_us += round(seconds * 1e6)
        if not self._prefilled:
            self._prefilled = True
            return
        mean = self._squares / self._tokens if self._tokens else 0.0
        keep = 1.0 - (1.0 - FORGET) * min(1.0, tokens / mean if mean else 1.0)
        self._tokens = keep * self._tokens + tokens
        self._squares = keep * self._squares + tokens * tokens
        self._busy = keep * self._busy + tokens * seconds

    def on_jump(self, tokens: int) -> None:
        """A request went on by so many tokens that were not sampled."""
        self.total_jumps += 1
        self.total_forced_tokens += tokens

    def on_decode(self, seconds: float) -> None:
        if not self._decoded:
            self._decoded = True
            return
        self._decode = FORGET * self._decode + (1 - FORGET) * seconds if self._decode else seconds

    @property
    def prefill_tokens_per_s(self) -> float:
        return self._squares / self._busy if self._busy else 0.0

    @property
    def decode_step_ms(self) -> float:
        return self._decode * 1e3
