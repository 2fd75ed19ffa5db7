"""`least_load`: the fewest requests in flight."""

from __future__ import annotations

from treeline_epp.picking.policies.base import Candidates, Policy, least_loaded
from treeline_epp.picking.request import Request


class LeastLoad(Policy):
    """Whatever they hold; equals are drawn."""

    name = "least_load"

    def rank(self, request: Request, candidates: Candidates, count: int) -> list[int]:
        """O(n) at memory speed."""
        return least_loaded(candidates.in_flight, count, self._rng)
