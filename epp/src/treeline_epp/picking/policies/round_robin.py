"""`round_robin`: one after the other, whatever they hold or do."""

from __future__ import annotations

from random import Random

import numpy as np

from treeline_epp.picking.policies.base import Candidates, NoParameters, Policy, Recent, lowest
from treeline_epp.picking.request import Request


class RoundRobin(Policy):
    """Turns are taken by identity: whichever endpoints come or go, the next is the one behind the last. The models of a
    pool take turns of their own, or they would share the endpoints between them unevenly."""

    name = "round_robin"

    def __init__(self, parameters: NoParameters, rng: Random) -> None:
        super().__init__(parameters, rng)
        self._last: Recent[tuple[str | None, str | None], float] = Recent(256)

    def rank(self, request: Request, candidates: Candidates, count: int) -> list[int]:
        """O(n) at memory speed."""
        turns = request.pool, request.model
        last = self._last.get(turns)
        identity = candidates.identity
        if last is None:  # several pickers do not all begin with the same one
            last = float(identity[self._rng.randrange(len(identity))])
        behind = identity - last
        order = lowest(np.where(behind > 0, behind, behind + 2.0**52), count)
        self._last.put(turns, float(identity[order[0]]))
        return order
