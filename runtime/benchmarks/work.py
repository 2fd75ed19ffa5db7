"""Requests that an engine is measured with: random token ids, and how many tokens each is to produce."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """Prompts as token ids, and how many tokens each is to produce."""

    prompts: list[list[int]]
    lengths: list[int]

    @classmethod
    def of(cls, count: int, longest: int, seed: int) -> Work:
        rng = random.Random(seed)
        prompts = [rng.choices(range(10, 4000), k=rng.randint(longest // 10, longest)) for _ in range(count)]
        return cls(prompts, [rng.randint(longest // 10, longest) for _ in range(count)])

    @classmethod
    def streams(cls, count: int, prompt: int, output: int) -> Work:
        rng = random.Random(1)
        return cls([rng.choices(range(10, 4000), k=prompt) for _ in range(count)], [output] * count)
