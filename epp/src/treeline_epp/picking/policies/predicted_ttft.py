"""`predicted_ttft`: least predicted cost, sticky until saturated. The default."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np

from treeline_epp.picking.candidates import Candidates
from treeline_epp.picking.policies.base import CostPolicy, NoParameters
from treeline_epp.picking.policies.ranking import led_by, lowest, one_of
from treeline_epp.picking.request import PickRequest
from treeline_epp.picking.table import Floats

EQUAL_S = 0.001
"""Scores closer than this are equal; the choice among equals is random, so that idle endpoints share the load."""
STICKY_S = 0.005
"""A worse endpoint with more of the prompt cached is kept while it is worse by no more than this (sticky until
saturated): a few milliseconds are below what predictions can tell, a moved prefix costs memory for minutes."""
STICKY_SHARE = 0.10


class PredictedTtft(CostPolicy):
    """The cost is `score`'s: seconds to the first token, and what the request costs those who come after it."""

    name = "predicted_ttft"

    def __init__(self, parameters: NoParameters, rng: Random) -> None:
        self._rng = rng

    def rank(self, request: PickRequest, candidates: Candidates, count: int) -> list[int]:
        """O(n) at memory speed."""
        return cheapest_first(candidates.cost_s, candidates.cached_tokens, count, self._rng)

    def rank_few(self, cost_s: Sequence[float], cached_tokens: Sequence[int], count: int) -> list[int]:
        """O(n log n)."""
        return cheapest_of_few(cost_s, cached_tokens, count, self._rng)


def cheapest_first(cost_s: Floats, cached_tokens: Floats, count: int, rng: Random) -> list[int]:
    """The cheapest, or one with more of the prompt cached that is hardly worse; ties within `EQUAL_S` fall at
    random. O(n) at memory speed."""
    near = np.flatnonzero(cost_s <= _hardly_worse(float(cost_s.min())))
    cached = cached_tokens[near]
    warmest = near[cached == cached.max()]
    cost = cost_s[warmest]
    first = one_of(warmest[cost <= cost.min() + EQUAL_S], rng)
    return led_by(first, lowest(cost_s, count), count)


def cheapest_of_few(cost_s: Sequence[float], cached_tokens: Sequence[int], count: int, rng: Random) -> list[int]:
    """The same as `cheapest_first`, for lists. O(n log n)."""
    limit = _hardly_worse(min(cost_s))
    near = [at for at, cost in enumerate(cost_s) if cost <= limit]
    most = max(cached_tokens[at] for at in near)
    warmest = [at for at in near if cached_tokens[at] == most]
    equal = min(cost_s[at] for at in warmest) + EQUAL_S
    first = one_of([at for at in warmest if cost_s[at] <= equal], rng)
    return led_by(first, sorted(range(len(cost_s)), key=cost_s.__getitem__)[:count], count)


def _hardly_worse(best_s: float) -> float:
    return best_s + max(STICKY_S, STICKY_SHARE * best_s)
