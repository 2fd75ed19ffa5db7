"""`prefix_hash`: the beginning of the prompt chooses the endpoint, with bounded loads.

By rendezvous hashing (Thaler and Ravishankar, 1998): the endpoint with the heaviest weight for the key gets it. When an
endpoint goes, only its keys move, and spread over all others. Weights depend on names alone: all pickers agree. Bounded
loads are those of Mirrokni, Thorup and Zadimoghaddam (2016): no endpoint may have more than `load_factor` times the
average of requests in flight, this one counted and rounded up; the next in the key's own order gets the excess.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from treeline_epp.picking.policies.base import BYTES_PER_TOKEN, Candidates, Count, Factor, Policy, least_loaded, lowest
from treeline_epp.picking.request import Request
from treeline_epp.picking.table import Floats


class PrefixHashParameters(Struct, frozen=True, forbid_unknown_fields=True):
    """`prefix_token_count`: tokens of the prompt that count, taken as four bytes of its text each; see the module for
    `load_factor`.
    """

    prefix_token_count: Count = 256
    load_factor: Factor = 1.25


def key_of(*parts: bytes) -> int:
    """Return 64 bits of a key's parts; their boundaries count."""
    data = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def weights(key: int, identity: Floats) -> npt.NDArray[np.uint64]:
    """Return the weight of each endpoint: the finalizer of SplitMix64 (Steele, Lea and Flood, 2014) over key and
    identity.
    """
    mixed = identity.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ mixed >> np.uint64(shift)) * np.uint64(factor)
    return mixed ^ mixed >> np.uint64(31)


class PrefixHash(Policy):
    """Takes the endpoint of the prompt's beginning. Requests without a readable prompt go to the lightest."""

    name = "prefix_hash"
    parameters = PrefixHashParameters

    def rank(self, request: Request, candidates: Candidates, count: int) -> list[int]:
        """Rank by weight within the bound. O(n) at memory speed."""
        load = candidates.in_flight
        if not request.key:
            return least_loaded(load, count, self._rng)
        whose = (request.namespace or "").encode("utf-8", "surrogatepass")
        beginning = request.key[: self._set.prefix_token_count * BYTES_PER_TOKEN]
        room = math.ceil((float(load.sum()) + 1.0) / len(load) * self._set.load_factor)
        weight = weights(key_of(whose, beginning), candidates.identity)
        full = np.where(load < room, np.uint64(0), np.uint64(1 << 63))
        return lowest(~weight >> np.uint64(1) | full, count)
