"""`least_load`: the fewest requests in flight."""

from __future__ import annotations

from treeline_epp.picking.policies.base import Candidates, Policy, least_loaded
from treeline_epp.picking.request import Request


class LeastLoad(Policy):
    """Takes the endpoint with the fewest requests; equals are drawn."""

    name = "least_load"

    def rank(self, request: Request, candidates: Candidates, count: int) -> list[int]:
        """Rank by load. O(n) at memory speed."""
        return least_loaded(candidates.in_flight, count, self._rng)
