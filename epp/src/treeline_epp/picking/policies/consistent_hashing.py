"""`consistent_hashing`: a header, the client or the prompt's beginning chooses the endpoint, with bounded loads.

Bounded loads are those of Mirrokni, Thorup and Zadimoghaddam (2016): none may have more than `load_factor` times the
average of requests in flight, this one counted and rounded up; the next in the key's own order gets what is beyond. The
header's default name is sgl-model-gateway's.
"""

from __future__ import annotations

import math
from random import Random
from typing import Literal

import numpy as np
from msgspec import Struct
from treeline_wire import headers as names

from treeline_epp.picking.candidates import Candidates
from treeline_epp.picking.policies.base import Factor, HeaderName, Policy
from treeline_epp.picking.policies.hashing import heaviest, key_of, weights
from treeline_epp.picking.policies.ranking import led_by, lightest, lowest
from treeline_epp.picking.request import PickRequest

PROMPT_BYTES = 1024
"""Of the prompt's text that count where it is the key."""


class ConsistentHashingParameters(Struct, frozen=True, forbid_unknown_fields=True):
    """`key` says what chooses: a request header, the client (its API key's name, else its address), or the prompt; this
    also where there is no such header or client."""

    key: Literal["header", "client", "prompt"] = "header"
    header: HeaderName = "x-smg-routing-key"
    load_factor: Factor = 1.25


class ConsistentHashing(Policy):
    """Requests that have no key, and no prompt that can be read, go to the lightest."""

    name = "consistent_hashing"
    parameters = ConsistentHashingParameters

    def __init__(self, parameters: ConsistentHashingParameters, rng: Random) -> None:
        self._set = parameters
        self._rng = rng

    @property
    def headers(self) -> tuple[str, ...]:
        return (self._set.header,) if self._set.key == "header" else (names.CLIENT, names.FORWARDED_FOR)

    def rank(self, request: PickRequest, candidates: Candidates, count: int) -> list[int]:
        """O(n) at memory speed."""
        load, key = candidates.in_flight, self._key(request)
        if not key:
            return led_by(lightest(load, self._rng), lowest(load, count), count)
        weight = weights(key_of(key), candidates.identity)
        room = math.ceil((float(load.sum()) + 1.0) / len(load) * self._set.load_factor)
        first = int(np.where(load < room, weight, np.uint64(0)).argmax())
        return led_by(first, heaviest(weight, count), count)

    def _key(self, request: PickRequest) -> bytes:
        headers, text = request.headers or {}, ""
        if self._set.key == "client":
            text = headers.get(names.CLIENT) or headers.get(names.FORWARDED_FOR, "").partition(",")[0]
        elif self._set.key == "header":
            text = headers.get(self._set.header, "")
        return text.encode("utf-8", "surrogatepass") or (request.key or b"")[:PROMPT_BYTES]
