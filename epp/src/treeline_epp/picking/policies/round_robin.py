"""`round_robin`: one after the other, regardless of caches and loads."""

from __future__ import annotations

from random import Random

import numpy as np

from treeline_epp.picking.policies.base import Candidates, NoParameters, Policy, Recent, lowest
from treeline_epp.picking.request import Request


class RoundRobin(Policy):
    """Takes turns by identity: when endpoints come or go, the next is the one after the last. Each model of a pool has
    turns of its own; otherwise the models would share the endpoints unevenly.
    """

    name = "round_robin"

    def __init__(self, parameters: NoParameters, rng: Random) -> None:
        super().__init__(parameters, rng)
        self._last: Recent[tuple[str | None, str | None], float] = Recent(256)

    def rank(self, request: Request, candidates: Candidates, count: int) -> list[int]:
        """Rank by turn. O(n) at memory speed."""
        turns = request.pool, request.model
        last = self._last.get(turns)
        identity = candidates.identity
        if last is None:  # so that several pickers do not all begin with the same endpoint
            last = float(identity[self._rng.randrange(len(identity))])
        behind = identity - last
        order = lowest(np.where(behind > 0, behind, behind + 2.0**52), count)
        self._last.put(turns, float(identity[order[0]]))
        return order
