"""`bucket`: endpoints by the length of prompts, so that short requests do not wait behind long ones.

As sgl-model-gateway's policy of this name (src/policies/bucket.rs): each endpoint has a range of lengths, in
characters, so that each has the same share of all characters of the last `bucket_adjust_interval_secs`. If the
characters sent to each in that time are uneven (by more than `balance_abs_threshold`, and the most more than
`balance_rel_threshold` times the least), the endpoint that got the fewest is next.
"""

from __future__ import annotations

from collections import Counter, deque
from random import Random
from typing import Annotated

from msgspec import Meta, Struct

from treeline_epp.picking.policies.base import BYTES_PER_TOKEN, Amount, Candidates, Factor, Policy, Recent
from treeline_epp.picking.request import Request

MOST_REQUESTS = 512


class BucketParameters(Struct, frozen=True, forbid_unknown_fields=True):
    """The thresholds; see the module. At most the last MOST_REQUESTS requests count."""

    balance_abs_threshold: Amount = 32.0
    balance_rel_threshold: Factor = 1.0001
    bucket_adjust_interval_secs: Annotated[float, Meta(gt=0)] = 5.0


class Bucket(Policy):
    """Sends each length to its endpoint. Endpoints are ordered by identity; models have buckets of their own."""

    name = "bucket"
    parameters = BucketParameters

    def __init__(self, parameters: BucketParameters, rng: Random) -> None:
        super().__init__(parameters, rng)
        self._lately: Recent[tuple[str | None, str | None], deque[tuple[float, int, float]]] = Recent(64)

    def rank(self, request: Request, candidates: Candidates, count: int) -> list[int]:
        """Return the endpoint of the prompt's length, then its neighbours. O(n + requests of the interval)."""
        chars = len(request.key) if request.key else request.prompt_tokens_estimate * BYTES_PER_TOKEN
        whose, now, order = (request.pool, request.model), candidates.now, candidates.identity.argsort().tolist()
        lately = self._lately.get(whose) or deque(maxlen=MOST_REQUESTS)
        self._lately.put(whose, lately)
        while lately and now - lately[0][0] > self._set.bucket_adjust_interval_secs:
            lately.popleft()
        owners, sent = candidates.identity[order].tolist(), Counter[float]()
        for _, length, owner in lately:
            sent[owner] += length
        least, most = min(owners, key=sent.__getitem__), max(sent[owner] for owner in owners)
        shorter = sum(length for _, length, _ in lately if length < chars)
        first = len(owners) * shorter // (sent.total() + chars + 1)
        uneven = most - sent[least] > self._set.balance_abs_threshold
        if uneven and most > self._set.balance_rel_threshold * sent[least]:
            first = owners.index(least)
        lately.append((now, chars, owners[first]))
        # Neighbours have nearly the same lengths.
        return [order[at] for at in sorted(range(len(order)), key=lambda at: abs(at - first))[:count]]
