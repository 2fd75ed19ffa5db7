"""The duration of a step: a roofline with a handful of constants, fitted to engines.

    step = fixed + sequence × batch + max(weights, token × prefill tokens) + attention × Σ pairs + context × Σ context

A step reads the weights once, and multiplies them with all tokens of prompts that it computes: the longer of the two
counts. *Pairs* are those of a token of a prompt with one before it, two for one (2·n·p + n² for n tokens after p).
*Context* are the tokens that running requests attend to. Without prompts, k steps of the same batch are one sum.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass


@dataclass(frozen=True, slots=True)
class Speed:
    """The seconds for each: a step, a running request, the weights, a token, a pair of tokens, a token of context."""

    fixed_s: float = 0.0
    sequence_s: float = 0.0
    weights_s: float = 0.0
    token_s: float = 0.0
    attention_s: float = 0.0
    context_s: float = 0.0

    def __post_init__(self) -> None:
        if not all(math.isfinite(value) and value >= 0 for value in (self.fixed_s, self.token_s, self.context_s)):
            raise ValueError("times of a step are finite and not negative")
        if self.fixed_s + self.weights_s <= 0:
            raise ValueError("a step without work must take time, or simulated time would stand still")

    def slower(self, factor: float) -> Speed:
        """Return a speed with all times multiplied by `factor`."""
        return Speed(*(factor * seconds for seconds in astuple(self)))

    def prefill_s(self, tokens: int, before: int = 0) -> float:
        """Return the seconds of a step that computes only `tokens` of one prompt after `before` others."""
        return self.step_s(0, 0, tokens, 2 * tokens * before + tokens * tokens)

    def step_s(self, batch: int, context: int, prefill: int = 0, pairs: int = 0) -> float:
        """Return the seconds of one step: `batch` running requests with `context` tokens in all, and prompts."""
        work = max(self.weights_s, self.token_s * prefill)
        return self.fixed_s + self.sequence_s * batch + work + self.attention_s * pairs + self.context_s * context

    def decode_s(self, batch: int, context: int, steps: int) -> float:
        """Return the seconds of several steps of the same batch, the first with `context` tokens: each has `batch`
        more.
        """
        grown = context * steps + batch * steps * (steps - 1) / 2
        return steps * self.step_s(batch, 0) + self.context_s * grown

    def steps_in(self, batch: int, context: int, seconds: float) -> int:
        """Return the fewest steps (at least 1) that take this long or longer. O(1)."""
        slope = self.context_s * batch / 2
        each = self.step_s(batch, context) - slope
        if slope * max(1.0, seconds) < 1e-15:
            found = seconds / each
        else:
            found = (math.sqrt(each * each + 4 * slope * max(0.0, seconds)) - each) / (2 * slope)
        steps = max(1, math.ceil(found - 1e-9))
        return steps if self.decode_s(batch, context, steps) >= seconds * (1 - 1e-12) else steps + 1


LLAMA_8B_H200 = Speed(
    weights_s=15.0e9 / 4.3e12,
    token_s=2 * 6.98e9 / 788e12,
    attention_s=2 * 32 * 32 * 128 / 788e12,
    context_s=131_072 / 4.3e12,
)
"""Llama-3.1-8B in bf16 on an H200: 15.0 GB of weights and 128 KiB of keys and values for a token at 4.3 TB/s, products
at 788 TFLOP/s (P = 6.98 G of weights; 32 layers × 32 heads × 128 of attention): 52.4k tokens/s for one of 4,096."""

TINY_CPU = Speed(
    fixed_s=0.00257,
    sequence_s=0.000132,
    token_s=0.0000773,
    attention_s=1.04e-7,
    context_s=6.77e-7,
)
"""Our runtime with the tiny model on one core of a CPU: fitted to eleven measured steps, of which ten are met within
7 %; a prompt of 512 tokens takes 24 % longer than in the model."""
