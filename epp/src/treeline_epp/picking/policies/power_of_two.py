"""`power_of_two`: of two that are drawn, the one with fewer requests in flight."""

from __future__ import annotations

from treeline_epp.picking.policies.base import Candidates, Policy
from treeline_epp.picking.request import Request


class PowerOfTwo(Policy):
    """Takes the lighter of two (Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 2001): nearly as
    even as comparing all, without sending every request to the endpoint that was the lightest in the last report.
    """

    name = "power_of_two"

    def rank(self, request: Request, candidates: Candidates, count: int) -> list[int]:
        """Rank a random sample. O(n) for the loads, O(count) besides."""
        size = len(candidates.cost_s)
        order = self._rng.sample(range(size), min(max(count, 2), size))
        load = candidates.in_flight
        if size > 1 and load[order[1]] < load[order[0]]:
            order[:2] = order[1], order[0]
        return order[:count]
