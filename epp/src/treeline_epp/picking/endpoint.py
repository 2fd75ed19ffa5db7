"""The picker's record of one endpoint.

The breaker: an endpoint that answers only errors is left out for a while, even if it claims to be ready. Such an
endpoint would otherwise draw all requests: it is idle, and quick. Errors in a row open the breaker; after a pause one
request tries the endpoint, and its answer closes the breaker or opens it again, for longer each time.

The audit: every answered request reports how much of its prompt was cached, which is compared with the index. One error
means little: between pick and prefill a pod may have evicted the blocks. It counts for that prefix only
(`AuditResult.CAP_HIT`: see `Index.cap_hit`). Errors across unrelated prefixes mean that the index is wrong about the
pod as a whole, after lost removals for instance: its entries are built again (`AuditResult.REBUILD`), not more often
than a back-off allows.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from msgspec.structs import replace

from treeline_epp.endpoints.load import EndpointLoad
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.index.pods import NO_HIT, Hit, Match, Pod

TOLERANCE_BLOCKS = 2
"""Blocks by which a report may differ from the prediction before it counts as an error."""
UNRELATED_ERRORS = 3
"""Errors on this many different prefixes within WINDOW_S, and in at least half of the requests, cause a rebuild."""
WINDOW_S = 30.0
BACKOFF_S = 10.0
MAX_BACKOFF_S = 300.0
CAPACITY_SLACK = 1.1
"""Factor by which an engine's blocks may exceed its memory: it announces new blocks before the evictions for them."""


class AuditResult(Enum):
    """The result of an observation."""

    AGREED = "agreed"
    CAP_HIT = "cap_hit"
    REBUILD = "rebuild"


@dataclass(slots=True)
class Audit:
    """The audit of one endpoint."""

    _seen: deque[tuple[float, int | None]] = field(default_factory=deque)
    _backoff: float = BACKOFF_S
    _quiet_until: float = float("-inf")

    def observe(
        self, confirmed: int, predicted: int, reported: int, block_size: int, prefix: int, now: float
    ) -> AuditResult:
        """Compare tokens: events said `confirmed` for the device, with routing history and lower tiers `predicted` ≥
        that, since an engine may load those or compute them again; the engine `reported`.

        `prefix` identifies the prompt's beginning: equal for related prompts. O(requests in the window).
        """
        tolerance = TOLERANCE_BLOCKS * max(1, block_size)
        over = reported < confirmed - tolerance
        under = reported > predicted + tolerance
        seen = self._seen
        seen.append((now, prefix if over or under else None))
        while seen[0][0] < now - WINDOW_S:
            seen.popleft()
        if not (over or under):
            return AuditResult.AGREED
        errors = [at for _, at in seen if at is not None]
        if len(set(errors)) >= UNRELATED_ERRORS and 2 * len(errors) >= len(seen) and self.allow(now):
            return AuditResult.REBUILD
        return AuditResult.CAP_HIT if over else AuditResult.AGREED

    def allow(self, now: float) -> bool:
        """Return whether a rebuild may begin now; if so, count it: the next one must wait, longer each time."""
        if now < self._quiet_until:
            return False
        if now > self._quiet_until + MAX_BACKOFF_S:
            self._backoff = BACKOFF_S
        self._quiet_until = now + self._backoff
        self._backoff = min(2 * self._backoff, MAX_BACKOFF_S)
        self._seen.clear()
        return True


ERRORS = 3
"""Errors in a row, with no other answer between them. One or two may be the requests' own fault."""
OPEN_S = 1.0
MAX_OPEN_S = 30.0


@dataclass(slots=True)
class Breaker:
    """The breaker of one endpoint. Readable: `errors`, the number in a row."""

    errors: int = 0
    _pause: float = OPEN_S
    _until: float = float("-inf")

    @property
    def tripped(self) -> bool:
        """Whether the endpoint is known to fail, until it answers."""
        return self.errors >= ERRORS

    @property
    def closed_until(self) -> float:
        """The time until which no request may go there; in the past if any may."""
        return self._until if self.tripped else float("-inf")

    def on_pick(self, now: float) -> None:
        """Count a request that goes there. If it is the trial, others wait for its result."""
        if self.tripped:
            self._until = now + self._pause

    def on_error(self, now: float) -> None:
        """Count a failed request."""
        self.errors += 1
        if self.tripped:
            self._until = now + self._pause
            self._pause = min(2 * self._pause, MAX_OPEN_S)

    def on_answer(self) -> None:
        """Count an answered request."""
        self.errors = 0
        self._pause = OPEN_S


def identity_of(name: str) -> float:
    """Return a number below 2⁵², which a float64 holds exactly."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") >> 12)


@dataclass(eq=False, slots=True)
class Endpoint:
    """An endpoint, its load, and its places in the index: `pods`, one for each data-parallel rank that publishes.

    Ranks have caches of their own, so each is a pod of its own to the index: if one of them removes, clears or loses
    blocks, the others keep theirs. They share the endpoint's row. The engine chooses the rank of a request, and so the
    endpoint is credited with the rank that holds most of it: a request may find that much there, and endpoints are
    ordered rightly by it. The real hit can be predicted for endpoints of one rank only; others are not audited.

    `keyed_prompts` counts the answered requests whose prompts had keys, `new_tokens` their tokens that were not known
    to be cached. `identity` is a number below 2⁵² made of its name, the same in every picker. `unanswered` are the
    open leases: requests whose answer has not begun.
    """

    spec: EndpointSpec
    pods: tuple[Pod, ...]
    load: EndpointLoad = field(default_factory=EndpointLoad)
    audit: Audit = field(default_factory=Audit)
    breaker: Breaker = field(default_factory=Breaker)
    ready: bool = True
    draining: bool = False
    keyed_prompts: int = 0
    new_tokens: int = 0
    unanswered: int = 0
    identity: float = field(init=False)

    def __post_init__(self) -> None:
        self.identity = identity_of(self.spec.name)

    @property
    def pod(self) -> Pod:
        """The first rank's pod; usually the only one."""
        return self.pods[0]

    @property
    def held_tokens(self) -> int:
        """The tokens that are known to be in its caches."""
        if len(self.pods) == 1:
            return self.pod.blocks * self.pod.block_size
        return sum(pod.blocks * pod.block_size for pod in self.pods)

    @property
    def overfull(self) -> bool:
        """Whether the index has more blocks than its memory holds: removals were lost."""
        total = 0 if self.load.report is None else self.load.report.tokens_total
        return bool(total) and self.held_tokens > CAPACITY_SLACK * total

    def best_hit(self, match: Match | None) -> tuple[int, Hit]:
        """Return the rank (its place in `pods`) that holds most of a key, and its hit; of lower tiers, the most that
        any rank holds. O(ranks × levels).
        """
        if match is None:
            return 0, NO_HIT
        if len(self.pods) == 1:
            return 0, match.hit(self.pods[0])
        hits = [match.hit(pod) for pod in self.pods]
        rank = max(range(len(hits)), key=lambda at: (hits[at].reach, hits[at].tokens, -at))
        if not any(pod.lower for pod in self.pods):
            return rank, hits[rank]
        return rank, replace(hits[rank], host=max(hit.host for hit in hits), disk=max(hit.disk for hit in hits))

    def expecting(self, rank: int) -> Pod:
        """Return the pod of a rank (of the last one, if there are fewer by now) for a prediction. Ranks are configured
        alike: if one's events are in the tree, predictions at any may have a short life.
        """
        pod = self.pods[min(rank, len(self.pods) - 1)]
        pod.precise = pod.precise or any(other.precise for other in self.pods)
        return pod

    @property
    def eligible(self) -> bool:
        """Whether new requests may go there."""
        report = self.load.report
        return self.ready and not self.draining and not (report is not None and report.draining)


def fallbacks(best: Sequence[Endpoint], most: int) -> tuple[EndpointSpec, ...]:
    """Return at most so many endpoints, of other addresses, that may answer instead of the first of the best ones."""
    first, rank = best[0].spec.address, best[0].spec.rank or 0
    chosen: dict[str, EndpointSpec] = {}
    for spec in (endpoint.spec for endpoint in best[1:]):
        # A fallback gets the same headers: it must have the rank that they name.
        if len(chosen) < most and spec.address != first and rank < spec.ranks:
            chosen.setdefault(spec.address, spec)
    return tuple(chosen.values())
