"""The inference extension's InferenceObjective and InferenceModelRewrite, as far as a picker acts on them."""

from __future__ import annotations

import msgspec


class Objective(msgspec.Struct, frozen=True):
    """An InferenceObjective."""

    name: str
    pool: str
    priority: int = 0


class RewriteRule(msgspec.Struct, frozen=True):
    """One rule of a rewrite: for requests for any of `models` (empty: for all), a target by weight. Where no target
    has a weight all are alike; where some have, the others get nothing."""

    targets: tuple[tuple[str, int], ...]
    models: frozenset[str] = frozenset()

    def draw(self, random: float) -> tuple[str, float]:
        """The target at `random` in [0, 1), and what is left of that for another draw, in [0, 1) too."""
        total = sum(weight for _, weight in self.targets)
        point = random * (total or len(self.targets))
        for name, weight in self.targets:
            share = weight if total else 1
            if point < share:
                return name, point / share
            point -= share
        return self.targets[-1][0], 0.0


class ModelRewrite(msgspec.Struct, frozen=True):
    """An InferenceModelRewrite; `created` is its creationTimestamp."""

    name: str
    pool: str
    rules: tuple[RewriteRule, ...]
    created: str = ""

    @property
    def age(self) -> tuple[str, str]:
        """Sorts the oldest first."""
        return self.created, self.name
