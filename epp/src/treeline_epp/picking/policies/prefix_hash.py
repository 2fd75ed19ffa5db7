"""`prefix_hash`: the beginning of the prompt chooses the endpoint, unless that is overloaded.

As sgl-model-gateway's policy of this name (src/policies/prefix_hash.rs): an endpoint is overloaded with more than
`load_factor` times the average of requests in flight, this one counted; then the lightest of the others gets it, and
the chosen one still where all are overloaded. `prefix_token_count` tokens of the prompt count, taken as four bytes each
of its text. Needs to know nothing of caches, and all pickers agree without speaking to each other.
"""

from __future__ import annotations

from random import Random

import numpy as np
from msgspec import Struct

from treeline_epp.picking.policies.base import Candidates, Count, Factor, Policy
from treeline_epp.picking.policies.hashing import heaviest, key_of, weights
from treeline_epp.picking.policies.ranking import led_by, lightest, lowest
from treeline_epp.picking.request import PickRequest

BYTES_PER_TOKEN = 4


class PrefixHashParameters(Struct, frozen=True, forbid_unknown_fields=True):
    """See the module."""

    prefix_token_count: Count = 256
    load_factor: Factor = 1.25


class PrefixHash(Policy):
    """Requests without a prompt that can be read go to the lightest."""

    name = "prefix_hash"
    parameters = PrefixHashParameters

    def __init__(self, parameters: PrefixHashParameters, rng: Random) -> None:
        self._set = parameters
        self._rng = rng

    def rank(self, request: PickRequest, candidates: Candidates, count: int) -> list[int]:
        """O(n) at memory speed."""
        load = candidates.in_flight
        if not request.key:
            return led_by(lightest(load, self._rng), lowest(load, count), count)
        prefix = request.key[: self._set.prefix_token_count * BYTES_PER_TOKEN]
        whose = (request.namespace or "").encode("utf-8", "surrogatepass")
        order = heaviest(weights(key_of(whose, prefix), candidates.identity), count)
        most = (float(load.sum()) + 1.0) / len(load) * self._set.load_factor
        if load[order[0]] > most:
            below = np.flatnonzero(load <= most)
            if len(below):
                return led_by(int(below[lightest(load[below], self._rng)]), order, count)
        return order
