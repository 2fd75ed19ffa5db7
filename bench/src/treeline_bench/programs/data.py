"""Texts that say nothing, of the lengths that matter: the same for the same seed."""

from __future__ import annotations

import random

from treeline_bench.prompts import PromptMaker


class Data:
    """Makes what a workload's programs are about. Lengths are in tokens of the model; `scale` multiplies each."""

    def __init__(self, maker: PromptMaker, seed: str, scale: float) -> None:
        self._maker = maker
        self.rng = random.Random(seed)
        self._scale = scale

    def tokens(self, full: int) -> int:
        """A length as scaled, at least 1."""
        return max(round(full * self._scale), 1)

    def text(self, tokens: int) -> str:
        """Words, so many tokens before the scaling; each begins with a space."""
        return self._maker.text(self.tokens(tokens), self.rng)

    def between(self, shortest: int, longest: int) -> str:
        """The same, of a length that is drawn."""
        return self.text(self.rng.randint(shortest, longest))

    def word(self) -> str:
        """One, without the space."""
        return self.rng.choice(self._maker.words).strip()
