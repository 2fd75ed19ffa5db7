"""`cache_aware`: the longest prefix while loads are even, the lightest load when they are not.

As sgl-model-gateway documents its policy of this name (src/policies/cache_aware.rs there): loads, requests in flight,
are uneven if the highest and the lowest differ by more than `balance_abs_threshold` *and* the highest is more than
`balance_rel_threshold` times the lowest. While they are even, the endpoint with the largest share of the prompt cached
gets the request if that share is above `cache_threshold`, and otherwise the lightest. Its tree has the prompts it has
sent to each worker; ours has the blocks that engines report. The defaults are those of its command line.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from treeline_epp.picking.policies.base import (
    Amount,
    Candidates,
    Factor,
    Policy,
    Share,
    least_loaded,
    led_by,
    lightest,
    lowest,
)
from treeline_epp.picking.request import Request


class CacheAwareParameters(Struct, frozen=True, forbid_unknown_fields=True):
    """The thresholds; see the module."""

    cache_threshold: Share = 0.3
    balance_abs_threshold: Amount = 64.0
    balance_rel_threshold: Factor = 1.5


class CacheAware(Policy):
    """Takes the lightest of the endpoints with the longest prefix."""

    name = "cache_aware"
    parameters = CacheAwareParameters

    def rank(self, request: Request, candidates: Candidates, count: int) -> list[int]:
        """Rank by prefix, or by load while loads are uneven. O(n) at memory speed."""
        load, cached = candidates.in_flight, candidates.cached_tokens
        share = cached / (cached + candidates.uncached_tokens)
        longest = float(share.max())
        if self._uneven(float(load.min()), float(load.max())) or longest <= self._set.cache_threshold:
            return least_loaded(load, count, self._rng)
        holders = np.flatnonzero(share == longest)
        first = int(holders[lightest(load[holders], self._rng)])
        return led_by(first, lowest(-share, count), count)

    def _uneven(self, least: float, most: float) -> bool:
        apart = most - least > self._set.balance_abs_threshold
        return bool(apart and most > self._set.balance_rel_threshold * least)
