"""`prefix_hash`: the beginning of the prompt chooses the endpoint, unless that is overloaded.

As sgl-model-gateway's policy of this name (src/policies/prefix_hash.rs): an endpoint is overloaded with more than
`load_factor` times the average of requests in flight, this one counted; then the lightest of the others gets it, and
the chosen one still where all are overloaded. `prefix_token_count` tokens of the prompt count, taken as four bytes each
of its text. Needs to know nothing of caches, and all pickers agree without speaking to each other.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from treeline_epp.picking.policies.base import Count, Factor, lightest
from treeline_epp.picking.policies.hashing import HashPolicy, Weights, key_of
from treeline_epp.picking.request import Request
from treeline_epp.picking.table import Floats

BYTES_PER_TOKEN = 4


class PrefixHashParameters(Struct, frozen=True, forbid_unknown_fields=True):
    """See the module."""

    prefix_token_count: Count = 256
    load_factor: Factor = 1.25


class PrefixHash(HashPolicy):
    """See the module."""

    name = "prefix_hash"
    parameters = PrefixHashParameters

    def key(self, request: Request, prompt: bytes) -> int:
        whose = (request.namespace or "").encode("utf-8", "surrogatepass")
        return key_of(whose, prompt[: self._set.prefix_token_count * BYTES_PER_TOKEN])

    def first(self, weight: Weights, load: Floats) -> int:
        heaviest = int(weight.argmax())
        most = (float(load.sum()) + 1.0) / len(load) * self._set.load_factor
        below = np.flatnonzero(load <= most)
        if load[heaviest] <= most or not len(below):
            return heaviest
        return int(below[lightest(load[below], self._rng)])
