"""`consistent_hashing`: the beginning of the prompt chooses the endpoint, with bounded loads.

Bounded loads are those of Mirrokni, Thorup and Zadimoghaddam (2016): no endpoint may have more than `load_factor` times
the average of requests in flight, this one counted and rounded up; the next in the key's own order gets what is beyond.
"""

from __future__ import annotations

import math

import numpy as np
from msgspec import Struct

from treeline_epp.picking.policies.base import Factor
from treeline_epp.picking.policies.hashing import HashPolicy, Weights, key_of
from treeline_epp.picking.request import Request
from treeline_epp.picking.table import Floats

PROMPT_BYTES = 1024
"""Of the prompt's text, so many choose the endpoint."""


class ConsistentHashingParameters(Struct, frozen=True, forbid_unknown_fields=True):
    """See the module."""

    load_factor: Factor = 1.25


class ConsistentHashing(HashPolicy):
    """See the module."""

    name = "consistent_hashing"
    parameters = ConsistentHashingParameters

    def key(self, request: Request, prompt: bytes) -> int:
        return key_of(prompt[:PROMPT_BYTES])

    def first(self, weight: Weights, load: Floats) -> int:
        room = math.ceil((float(load.sum()) + 1.0) / len(load) * self._set.load_factor)
        return int(np.where(load < room, weight, np.uint64(0)).argmax())
