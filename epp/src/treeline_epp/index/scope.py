"""The pods that share a tree, and their bits."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Self

from treeline_epp.index.event_filter import Tier
from treeline_epp.index.limits import IndexLimits
from treeline_epp.index.matching import Level, Unite, Walk, match, uniting
from treeline_epp.index.orphans import Orphan, Orphans
from treeline_epp.index.pods import Pod
from treeline_epp.index.predictions import Predictions
from treeline_epp.index.radix_tree import RadixTree


@dataclass(eq=False, slots=True)
class Scope:
    """The pods that share a tree. `live` are the bits of its pods' devices that count in matches; `aged` its pods and
    tiers that have more than one bit; `tiered` the pods with tiers below the device. `gone` are orphans that were
    removed already, and leave the tree when no descendant needs them to find its place.
    """

    tree: RadixTree
    predictions: Predictions
    orphans: Orphans
    live: int = 0
    aged: dict[Pod, None] = field(default_factory=dict)
    tiered: dict[Pod, None] = field(default_factory=dict)
    gone: deque[Orphan] = field(default_factory=deque)
    _below: tuple[int, dict[Tier, Unite]] | None = None  # for `lower`, until the bits change

    @classmethod
    def empty(cls, limits: IndexLimits) -> Self:
        """Return a scope without pods."""
        predictions = Predictions()
        return cls(RadixTree(limits.max_edge, predictions.moved), predictions, Orphans(limits.max_orphan_blocks))

    def add(self, pod: Pod, bit: int) -> None:
        """Let a bit of a pod, or of a tier, count in matches. O(1)."""
        self._below = None
        if pod.tier is None:
            self.live |= bit

    def retire(self, bit: int) -> None:
        """Let a bit count no more. O(1)."""
        self._below = None
        self.live &= ~bit
        self.predictions.forget(bit)

    def lower(self, path: Walk) -> dict[Tier, list[Level]]:
        """Return the levels of the pods with lower tiers: when host memory counts too, and when everything does."""
        if self._below is None:
            held, by_tier = {pod: pod.bits for pod in self.tiered}, dict[Tier, Unite]()
            for tier in Tier:
                having = [pod for pod in held if tier in pod.lower]
                held |= {pod: held[pod] | pod.lower[tier].bits for pod in having}
                if having:
                    by_tier[tier] = uniting(list(held.values()))
            self._below = sum(pod.bit for pod in held), by_tier
        pods, by_tier = self._below
        return {tier: match(self.tree, path, pods, unite) for tier, unite in by_tier.items()}

    def check(self, owners: Collection[Pod]) -> None:
        """Assert every invariant; `owners` are its pods and their tiers. O(scope)."""
        self.tree.check()
        self.orphans.check()
        pods = {pod for pod in owners if pod.tier is None}
        assert self.live == sum(pod.bits for pod in pods)
        assert set(self.aged) == {pod for pod in owners if pod.aged}
        assert set(self.tiered) == {pod for pod in pods if pod.lower}
        assert set(owners) - pods == {lower for pod in pods for lower in pod.lower.values()}
