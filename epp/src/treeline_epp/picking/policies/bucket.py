"""`bucket`: endpoints by the length of prompts, so that short requests do not wait behind long ones.

As sgl-model-gateway's policy of this name (src/policies/bucket.rs): each endpoint has a range of lengths, in
characters; at first 4,096 are shared out evenly, and the last has all that are longer. Every
`bucket_adjust_interval_secs` the ranges are set again, so that in what came during the last interval each has the same
share of all characters, if that share has more than doubled or halved. Where the characters sent to each in that time
are uneven (by more than `balance_abs_threshold`, and the most more than `balance_rel_threshold` times the least), the
one that got the fewest is next.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import accumulate
from random import Random
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from treeline_epp.picking.policies.base import Amount, Candidates, Factor, Policy, Recent
from treeline_epp.picking.policies.prefix_hash import BYTES_PER_TOKEN
from treeline_epp.picking.request import Request

FIRST_CHARS = 4096
"""Lengths that are shared out before anything is known."""
MOST_REQUESTS = 1 << 13
"""Of one interval that are remembered."""


class BucketParameters(Struct, frozen=True, forbid_unknown_fields=True):
    """See the module."""

    balance_abs_threshold: Amount = 32.0
    balance_rel_threshold: Factor = 1.0001
    bucket_adjust_interval_secs: Annotated[float, Meta(gt=0)] = 5.0


class Bucket(Policy):
    """Models have buckets of their own; endpoints are in the order of their identities."""

    name = "bucket"
    parameters = BucketParameters

    def __init__(self, parameters: BucketParameters, rng: Random) -> None:
        self._set = parameters
        self._buckets: Recent[tuple[str | None, str | None], Buckets] = Recent(64)

    def rank(self, request: Request, candidates: Candidates, count: int) -> list[int]:
        """O(n), and O(requests of an interval) more once an interval, or where endpoints have come or gone."""
        chars = len(request.key) if request.key else request.prompt_tokens_estimate * BYTES_PER_TOKEN
        whose = request.pool, request.model
        buckets = self._buckets.get(whose) or Buckets(self._set.bucket_adjust_interval_secs)
        self._buckets.put(whose, buckets)
        order = np.argsort(candidates.identity)
        owners = candidates.identity[order].tolist()
        buckets.advance(candidates.now, len(owners))
        sent = [buckets.sent[owner] for owner in owners]
        least, most = min(sent), max(sent)
        uneven = most - least > self._set.balance_abs_threshold and most > self._set.balance_rel_threshold * least
        first = sent.index(least) if uneven else int(np.searchsorted(buckets.edges, chars))
        buckets.add(owners[first], chars, candidates.now)
        # Neighbours take lengths that are nearly its own.
        near: list[int] = order[np.argsort(np.abs(np.arange(len(order)) - first), kind="stable")].tolist()
        return near[:count]


class Buckets:
    """Who gets which lengths, and what was `sent` to whom (identity → characters) in the last `interval_s`."""

    def __init__(self, interval_s: float) -> None:
        self.sent: Counter[float] = Counter()
        self.edges: list[int] = []
        """The longest length of each but the last."""
        self._interval_s = interval_s
        self._size = self._share = 0
        self._window: deque[tuple[float, int, float]] = deque()
        self._adjust_at = float("inf")

    def advance(self, now: float, size: int) -> None:
        """There are so many candidates, and it is `now`."""
        while self._window and (now - self._window[0][0] > self._interval_s or len(self._window) > MOST_REQUESTS):
            _, chars, owner = self._window.popleft()
            self.sent[owner] -= chars
            if not self.sent[owner]:
                del self.sent[owner]
        if changed := size != self._size:
            self.edges, self._share = [max(1, FIRST_CHARS // size) * at - 1 for at in range(1, size)], 0
        if changed or now >= self._adjust_at:
            self._adjust_at = now + self._interval_s
            self._size = size
            self._adjust()

    def add(self, owner: float, chars: int, now: float) -> None:
        """A request of this length went there."""
        self.sent[owner] += chars
        self._window.append((now, chars, owner))

    def _adjust(self) -> None:
        """As bucket.rs has it: the shortest requests fill the first range until it has its share, then the next; one
        that would have no length of its own gets as many lengths as the share."""
        lengths = sorted(chars for _, chars, _ in self._window)
        share = sum(lengths) // self._size
        if not lengths or (self._share and share <= 2 * self._share and self._share <= 2 * share):
            return
        self._share, self.edges = share, []
        sums, lower, done = list(accumulate(lengths)), 0, 0
        for _ in range(self._size - 1):
            wanted = (sums[done - 1] if done else 0) + share
            at = max(int(np.searchsorted(sums, wanted)), done)
            upper = lengths[at] if at < len(lengths) else lower
            self.edges.append(upper if upper > lower else lower + share)
            lower, done = self.edges[-1] + 1, min(at + 1, len(lengths))
