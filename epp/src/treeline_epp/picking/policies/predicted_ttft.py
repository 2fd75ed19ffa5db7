"""`predicted_ttft`: least predicted cost, sticky until saturated. The default."""

from __future__ import annotations

from random import Random

from treeline_epp.picking.policies.base import Candidates, Policy, led_by, lowest, one_of
from treeline_epp.picking.request import Request
from treeline_epp.picking.table import Floats

STICKY_S = 0.005
"""Seconds by which an endpoint with more of the prompt cached may cost more (sticky until saturated): predictions are
no more precise than a few milliseconds, and a moved prefix costs memory for minutes."""
STICKY_SHARE = 0.10


class PredictedTtft(Policy):
    """Takes the least cost by `score`: seconds to the first token, and the request's cost to later ones."""

    name = "predicted_ttft"
    by_cost = True

    def rank(self, request: Request, candidates: Candidates, count: int) -> list[int]:
        """Rank by cost. O(n) at memory speed."""
        return cheapest_first(candidates.cost_s, candidates, count, self._rng)


def cheapest_first(cost_s: Floats, candidates: Candidates, count: int, rng: Random) -> list[int]:
    """Return the cheapest; or, of those that cost hardly more, one with more of the prompt cached, and of these the one
    with the fewest requests, at random among equals: so a prefix that is cached nowhere begins at the idlest. O(n) at
    memory speed.
    """
    order = lowest(cost_s, count)
    near = (cost_s <= _hardly_worse(float(cost_s[order[0]]))).nonzero()[0]
    if len(near) == 1:
        return order
    cached = candidates.cached_tokens[near]
    warmest = near[cached == cached.max()]
    if len(warmest) > 1:
        in_flight = candidates.in_flight[warmest]
        warmest = warmest[in_flight == in_flight.min()]
    return led_by(one_of(warmest, rng), order, count)


def _hardly_worse(best_s: float) -> float:
    return best_s + max(STICKY_S, STICKY_SHARE * best_s)
