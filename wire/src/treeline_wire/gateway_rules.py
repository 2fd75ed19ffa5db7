"""The inference extension's InferenceObjective and InferenceModelRewrite, as far as a picker uses them."""

from __future__ import annotations

import msgspec


class Objective(msgspec.Struct, frozen=True):
    """An InferenceObjective."""

    name: str
    pool: str
    priority: int = 0


class RewriteRule(msgspec.Struct, frozen=True):
    """One rule of a rewrite: requests for any of `models` (empty: all) get a target by weight. Without weights all
    targets are equal; if some have weights, the others get nothing."""

    targets: tuple[tuple[str, int], ...]
    models: frozenset[str] = frozenset()

    def draw(self, random: float) -> tuple[str, float]:
        """Returns the target at `random` in [0, 1), and a new number in [0, 1) for another draw."""
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
        """Sort key, oldest first."""
        return self.created, self.name
