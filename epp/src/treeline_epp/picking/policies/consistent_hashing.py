"""`consistent_hashing`: the beginning of the prompt chooses the endpoint, with bounded loads.

Bounded loads are those of Mirrokni, Thorup and Zadimoghaddam (2016): no endpoint may have more than `load_factor` times
the average of requests in flight, this one counted and rounded up; the next in the key's own order gets what is beyond.
"""

from __future__ import annotations

import math
from random import Random

import numpy as np
from msgspec import Struct

from treeline_epp.picking.policies.base import Candidates, Factor, Policy
from treeline_epp.picking.policies.hashing import heaviest, key_of, weights
from treeline_epp.picking.policies.ranking import led_by, lightest, lowest
from treeline_epp.picking.request import PickRequest

PROMPT_BYTES = 1024
"""Of the prompt's text, so many choose the endpoint."""


class ConsistentHashingParameters(Struct, frozen=True, forbid_unknown_fields=True):
    """See the module."""

    load_factor: Factor = 1.25


class ConsistentHashing(Policy):
    """Requests without a prompt that can be read go to the lightest."""

    name = "consistent_hashing"
    parameters = ConsistentHashingParameters

    def __init__(self, parameters: ConsistentHashingParameters, rng: Random) -> None:
        self._set = parameters
        self._rng = rng

    def rank(self, request: PickRequest, candidates: Candidates, count: int) -> list[int]:
        """O(n) at memory speed."""
        load = candidates.in_flight
        if not request.key:
            return led_by(lightest(load, self._rng), lowest(load, count), count)
        weight = weights(key_of(request.key[:PROMPT_BYTES]), candidates.identity)
        room = math.ceil((float(load.sum()) + 1.0) / len(load) * self._set.load_factor)
        first = int(np.where(load < room, weight, np.uint64(0)).argmax())
        return led_by(first, heaviest(weight, count), count)
