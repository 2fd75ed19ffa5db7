"""Rendezvous hashing (Thaler and Ravishankar, 1998) in array operations.

Each endpoint has a weight for each key, and the heaviest gets it. When one of n endpoints goes, its keys alone move, a
share of 1/n, and spread over all others; when one comes, it takes a share of 1/n from all others. There is no ring to
keep, and whatever subset of the endpoints may be used, it is true of that. Weights depend on names alone: all pickers
agree.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from treeline_epp.picking.policies.base import Candidates, Policy, led_by, lightest, lowest
from treeline_epp.picking.request import Request
from treeline_epp.picking.table import Floats

Weights = npt.NDArray[np.uint64]


def key_of(*parts: bytes) -> int:
    """64 bits of a key's parts; where one ends and the next begins counts."""
    data = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def weights(key: int, identity: Floats) -> Weights:
    """The weight of each endpoint for a key of 64 bits: the finalizer of SplitMix64 (Steele, Lea and Flood, 2014) over
    both. O(n)."""
    mixed = identity.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= np.uint64(key)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


class HashPolicy(Policy):
    """A key of the request chooses, as far as loads allow; requests without a readable prompt go to the lightest."""

    def __init__(self, parameters: Any, rng: Random) -> None:
        self._set = parameters
        self._rng = rng

    @abstractmethod
    def key(self, request: Request, prompt: bytes) -> int:
        """What of a request chooses, `prompt` being its prefix key."""

    @abstractmethod
    def first(self, weight: Weights, load: Floats) -> int:
        """The place of the chosen one, by weights and requests in flight."""

    def rank(self, request: Request, candidates: Candidates, count: int) -> list[int]:
        """O(n) at memory speed."""
        load = candidates.in_flight
        if not request.key:
            return led_by(lightest(load, self._rng), lowest(load, count), count)
        weight = weights(self.key(request, request.key), candidates.identity)
        return led_by(self.first(weight, load), lowest(~weight, count), count)
