"""`bucket`: endpoints by the length of prompts, so that short requests do not wait behind long ones.

As sgl-model-gateway's policy of this name (sgl-model-gateway/src/policies/bucket.rs). Each endpoint has a range of
lengths, in characters; at first 4,096 are shared out evenly, and the last has all that are longer. Every
`bucket_adjust_interval_secs` the ranges are set again, so that in what came during the last interval each has the same
share of all characters, if that share has more than doubled or halved. Where the characters sent to each in that time
are uneven (by more than `balance_abs_threshold`, and the most more than `balance_rel_threshold` times the least), the
one that got the fewest is next.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from random import Random
from typing import Annotated

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from treeline_epp.picking.policies.base import Amount, Candidates, Factor, Policy
from treeline_epp.picking.policies.prefix_hash import BYTES_PER_TOKEN
from treeline_epp.picking.policies.ranking import led_by
from treeline_epp.picking.policies.recent import Recent
from treeline_epp.picking.request import PickRequest
from treeline_epp.picking.table import Floats

FIRST_CHARS = 4096
"""Lengths that are shared out before anything is known."""
MOST_REQUESTS = 1 << 13
"""Of one interval that are remembered."""

Edges = npt.NDArray[np.int64]


class BucketParameters(Struct, frozen=True, forbid_unknown_fields=True):
    """See the module."""

    balance_abs_threshold: Amount = 32.0
    balance_rel_threshold: Factor = 1.0001
    bucket_adjust_interval_secs: Annotated[float, Meta(gt=0)] = 5.0


class Bucket(Policy):
    """Models have buckets of their own."""

    name = "bucket"
    parameters = BucketParameters

    def __init__(self, parameters: BucketParameters, rng: Random) -> None:
        self._set = parameters
        self._buckets: Recent[tuple[str | None, str | None], Buckets] = Recent(64)

    def rank(self, request: PickRequest, candidates: Candidates, count: int) -> list[int]:
        """O(n) at memory speed; O(requests of an interval) more where endpoints have come or gone, and once an
        interval."""
        chars = len(request.key) if request.key else request.prompt_tokens_estimate * BYTES_PER_TOKEN
        whose = request.pool, request.model
        buckets = self._buckets.get(whose)
        if buckets is None:
            buckets = Buckets(self._set.bucket_adjust_interval_secs)
            self._buckets.put(whose, buckets)
        buckets.advance(candidates.now, candidates.identity)
        sent = buckets.sent
        least, most = float(sent.min()), float(sent.max())
        uneven = most - least > self._set.balance_abs_threshold and most > self._set.balance_rel_threshold * least
        first = int(sent.argmin()) if uneven else buckets.of(chars)
        buckets.add(first, chars, candidates.now)
        # Neighbours take lengths that are nearly its own.
        order = np.argsort(np.abs(np.arange(len(sent)) - first), kind="stable")[:count]
        return led_by(*buckets.places(first, order), count)


class Buckets:
    """Who gets which lengths, and what was sent to whom in the last `interval_s`. Endpoints are in the order of their
    identities; `sent` are the characters sent to each."""

    def __init__(self, interval_s: float) -> None:
        self.sent: Floats = np.zeros(0)
        self.edges: Edges = np.zeros(0, np.int64)
        """The longest length of each but the last."""
        self._interval_s = interval_s
        self._identity: Floats = np.zeros(0)
        self._order: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._sorted: Floats = np.zeros(0)
        self._window: deque[tuple[float, int, float]] = deque()
        self._adjust_at: float | None = None
        self._share = 0

    def advance(self, now: float, identity: Floats) -> None:
        """The candidates are these, and it is `now`."""
        if not np.array_equal(identity, self._identity):
            self._identity = identity.copy()
            self._order = np.argsort(self._identity)
            self._sorted = self._identity[self._order]
            size = len(identity)
            gap = max(1, FIRST_CHARS // size)
            self.edges, self._share = np.arange(1, size, dtype=np.int64) * gap - 1, 0
            self.sent = self._sent_in_window()
            if self._window:
                self._adjust()
        while self._window and (now - self._window[0][0] > self._interval_s or len(self._window) > MOST_REQUESTS):
            _, chars, whose = self._window.popleft()
            self._count(whose, -chars)
        if self._adjust_at is None:
            self._adjust_at = now + self._interval_s
        elif now >= self._adjust_at:
            self._adjust_at = now + self._interval_s
            self._adjust()

    def of(self, chars: int) -> int:
        """Whose range a length is in. O(log n)."""
        return int(np.searchsorted(self.edges, chars))

    def add(self, at: int, chars: int, now: float) -> None:
        """A request of this length went to the one at `at`."""
        self.sent[at] += chars
        self._window.append((now, chars, float(self._sorted[at])))

    def places(self, first: int, order: npt.NDArray[np.int64]) -> tuple[int, list[int]]:
        """The same among the candidates."""
        others: list[int] = self._order[order].tolist()
        return int(self._order[first]), others

    def _count(self, whose: float, chars: int) -> None:
        at = int(np.searchsorted(self._sorted, whose))
        if at < len(self._sorted) and self._sorted[at] == whose:
            self.sent[at] += chars

    def _sent_in_window(self) -> Floats:
        whose = np.fromiter((whose for _, _, whose in self._window), np.float64, len(self._window))
        chars = np.fromiter((chars for _, chars, _ in self._window), np.float64, len(self._window))
        at = np.searchsorted(self._sorted, whose)
        here = np.append(self._sorted, np.nan)[at] == whose
        return np.bincount(at[here], chars[here], len(self._sorted)).astype(np.float64)

    def _adjust(self) -> None:
        """Ranges with the same share of the window's characters. As bucket.rs has it: the shortest requests fill the
        first range until it has its share, then the next; one that would have no length of its own gets as many lengths
        as the share."""
        lengths = np.sort(np.fromiter((chars for _, chars, _ in self._window), np.int64, len(self._window)))
        size = len(self._sorted)
        share = int(lengths.sum()) // size if size else 0
        if not len(lengths) or (self._share and share <= 2 * self._share and self._share <= 2 * share):
            return
        self._share = share
        sums, upto = np.cumsum(lengths).tolist(), lengths.tolist()
        edges: list[int] = []
        lower, done = 0, 0
        for _ in range(size - 1):
            before = sums[done - 1] if done else 0
            at = max(bisect_left(sums, before + share), done)
            upper = upto[at] if at < len(upto) else lower
            edge = upper if upper > lower else lower + share
            edges.append(edge)
            lower, done = edge + 1, min(at + 1, len(upto))
        self.edges = np.array(edges, np.int64)
