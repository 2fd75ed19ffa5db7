"""`lora_affinity`: least predicted cost, where an endpoint without the request's adapter must load it first.

An adapter counts as loaded at an engine whose events have named it, and where this picker has lately sent a request
for it. `load_s` is the time to load it: an endpoint that has the adapter keeps its requests until waiting there costs
more than that, and then the adapter spreads.
"""

from __future__ import annotations

from random import Random

import numpy as np
from msgspec import Struct
from treeline_wire.namespaces import adapter_of

from treeline_epp.picking.policies.base import Amount, Candidates, Policy, Recent
from treeline_epp.picking.policies.predicted_ttft import cheapest_first
from treeline_epp.picking.request import Request

_ADAPTERS = 1024
_ENDPOINTS = 64
"""Most endpoints that are remembered for an adapter."""


class LoraAffinityParameters(Struct, frozen=True, forbid_unknown_fields=True):
    """`load_s`: seconds that loading an adapter costs. `remember_s`: how long an endpoint counts as having the adapter
    of a request sent there, if no event confirms it.
    """

    load_s: Amount = 1.0
    remember_s: Amount = 60.0


class LoraAffinity(Policy):
    """Adds the cost of loading. Requests without an adapter go where `predicted_ttft` sends them."""

    name = "lora_affinity"
    parameters = LoraAffinityParameters

    def __init__(self, parameters: LoraAffinityParameters, rng: Random) -> None:
        super().__init__(parameters, rng)
        self._sent: Recent[str, dict[float, float]] = Recent(_ADAPTERS)

    def rank(self, request: Request, candidates: Candidates, count: int) -> list[int]:
        """Rank by cost. O(n) at memory speed without an adapter; with one, a look at each endpoint's adapters."""
        cost_s, adapter = candidates.cost_s, adapter_of(request.namespace)
        if adapter is None:
            return cheapest_first(cost_s, candidates, count, self._rng)
        sent, now = self._sent.get(adapter) or {}, candidates.now
        lately = [identity for identity, at in sent.items() if now - at <= self._set.remember_s]
        loaded = candidates.has_adapter(adapter) | np.isin(candidates.identity, lately)
        order = cheapest_first(cost_s + self._set.load_s * ~loaded, candidates, count, self._rng)
        first = float(candidates.identity[order[0]])
        others = [(identity, at) for identity, at in sent.items() if identity != first and identity in lately]
        self._sent.put(adapter, dict([*others[1 - _ENDPOINTS :], (first, now)]))
        return order
