"""`random`: any of them, evenly."""

from __future__ import annotations

from random import Random

from treeline_epp.picking.policies.base import Candidates, NoParameters, Policy
from treeline_epp.picking.request import Request


class RandomChoice(Policy):
    """Blind, to compare with."""

    name = "random"

    def __init__(self, parameters: NoParameters, rng: Random) -> None:
        self._rng = rng

    def rank(self, request: Request, candidates: Candidates, count: int) -> list[int]:
        """O(count)."""
        return self._rng.sample(range(len(candidates.cost_s)), min(count, len(candidates.cost_s)))
