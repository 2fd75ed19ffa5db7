"""`least_load`: the fewest requests in flight."""

from __future__ import annotations

from random import Random

from treeline_epp.picking.policies.base import Candidates, NoParameters, Policy, led_by, lightest, lowest
from treeline_epp.picking.request import Request


class LeastLoad(Policy):
    """Whatever they hold; equals are drawn."""

    name = "least_load"

    def __init__(self, parameters: NoParameters, rng: Random) -> None:
        self._rng = rng

    def rank(self, request: Request, candidates: Candidates, count: int) -> list[int]:
        """O(n) at memory speed."""
        load = candidates.in_flight
        return led_by(lightest(load, self._rng), lowest(load, count), count)
