"""`random`: any of them, evenly."""

from __future__ import annotations

from treeline_epp.picking.policies.base import Candidates, Policy
from treeline_epp.picking.request import Request


class RandomChoice(Policy):
    """Takes any endpoint: a baseline for comparisons."""

    name = "random"

    def rank(self, request: Request, candidates: Candidates, count: int) -> list[int]:
        """Rank at random. O(count)."""
        return self._rng.sample(range(len(candidates.cost_s)), min(count, len(candidates.cost_s)))
