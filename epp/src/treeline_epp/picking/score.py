"""The cost of a request at each endpoint, in seconds.

The cost of a candidate is a sum of named terms. The first five are its predicted time to first token:

    queue_s    uncached tokens before it ÷ prefill rate
    prefill_s  its own uncached tokens ÷ prefill rate
    load_s     its tokens that are cached in host memory or on disk alone ÷ the rates at which the endpoint loads them,
               and never more than computing them
    slots_s    if all running slots are taken: time until enough of them come free
    full_s     if the endpoint just refused a request for want of room: the wait until it may take one

The others are costs that come later, for itself and for later requests:

    decode_s   its output ÷ the endpoint's decode speed, beyond what the endpoint needs when it is nearly idle, a
               quarter of it (`DECODE_WEIGHT`). Without this term requests that share a prefix and have short prompts
               but long outputs would all run on one endpoint, whose prefill queue is always empty
    others_s   its prefill's cost to requests that come before it is done: those that come while it waits, wait for all
               of it, those that come while it is computed, on average for half of it. Their number is measured at each
               endpoint (`reservations.arrivals_per_s`); one more, the next, is assumed: otherwise a burst on one new
               prefix would compute it on every endpoint, each a little sooner than waiting for the first.
               If the request says how many like it will follow (`fork`): also the time until the last of them has a
               running slot
    evict_s    if pages are nearly full: work that must be done again for the blocks it would evict
    adapter_s  at an endpoint that says that the request's adapter has no slot on its device: putting it there
    follow_s   at an endpoint that gets more than its share of requests, the cost to those that follow: each waits
               longer there than at the best endpoint. It holds a prefix that many share, and a second holder would take
               some of them. It needs all candidates (`follow_s`, the function)

The cost of running requests to a prefill needs no term: prefill rates are measured with decodes in the same steps.

The costs of many candidates are computed in arrays (`waits_and_costs`); the best are then scored one by one (`score`),
for their terms. Few candidates are all scored one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Self

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from treeline_epp.endpoints.load import EndpointLoad, Report
from treeline_epp.endpoints.reservations import ARRIVALS_S, arrivals_per_s
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.index.event_filter import Tier
from treeline_epp.index.pods import NO_HIT, Hit, Match, level_hit
from treeline_epp.picking.request import Request
from treeline_epp.picking.table import (
    ARRIVALS,
    ARRIVED_AT,
    DISK_RATE,
    EXCESS,
    FREE_TOKENS,
    FULL_UNTIL,
    HIT_SHARE,
    HOST_RATE,
    MAX_RUNNING,
    QUEUED_TOKENS,
    SLOWER_S,
    TOKEN_S,
    Floats,
    Rows,
    Table,
)

if TYPE_CHECKING:  # the index brings the chat templates, and help needs neither
    from treeline_epp.index.index import Index

DELAYED_REQUESTS = 1.0
"""Number of later requests that this one is assumed to delay, besides those of the arrival rate."""
ASSUMED_OUTPUT_TOKENS = 64
"""Output tokens that a request is assumed to generate still: a running one, and a new one that does not allow fewer."""
DECODE_WEIGHT = 0.25
"""Weight of a second more of output time, against a second until the first token. First tokens alone would give 3
steps of 64: the request waits for half a step and is computed in one; and those that come during its output are, by
Little's law, as many as run there, so it delays their first tokens by as much in all. The rest is for outputs. With a
larger weight requests leave their prefix sooner to spread decodes, and compute it again, which delays the outputs that
run there; with a smaller one outputs gather longer where they are slow."""
FOLLOWERS = 0.1
"""Share of an endpoint's requests beyond the mean that a second holder of this prefix would take. With a larger share
a popular prefix is computed sooner on several endpoints; with a smaller one some endpoints stay busy longer and others
idle."""
HOST_SPEED, DISK_SPEED = 8.0, 1.5
"""Rates of loading tokens from host memory and from disk, as multiples of the prefill rate, where an engine does not
tell its own. PCIe 5 gives an 8B model on one H200 ten times the prefill rate, and a local NVMe 1.4 times; a larger
model, whose prefill is slower, gains more."""
TAIL_VALUE = 0.5
"""Value of the oldest cached tokens, as a share of the average."""


class Candidate(Struct, frozen=True):
    """An eligible endpoint and all inputs of its score. `rate` is prefill tokens per second; `hit` the index's hit for
    the prompt, `cached_tokens` that hit with predictions and lower tiers, of which `host_tokens` and `disk_tokens` must
    be loaded. `output_tokens` are expected of the request. `held_tokens` are known to be in its cache. `rank` is the
    rank with the hit. `fork` requests will follow it.
    """

    spec: EndpointSpec
    load: EndpointLoad
    rate: float
    hit: Hit = NO_HIT
    cached_tokens: int = 0
    uncached_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    output_tokens: int = ASSUMED_OUTPUT_TOKENS
    held_tokens: int = 0
    rank: int = 0
    fork: int = 0


class Scored(Struct, frozen=True):
    """A candidate with its cost, term by term; see the module. `cost_s` is compared."""

    candidate: Candidate
    cost_s: float
    ttft_s: float = 0.0
    queued_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    load_s: float = 0.0
    slots_s: float = 0.0
    full_s: float = 0.0
    decode_s: float = 0.0
    others_s: float = 0.0
    evict_s: float = 0.0
    follow_s: float = 0.0
    adapter_s: float = 0.0

    @property
    def wait_s(self) -> float:
        """The seconds until its own prefill begins, without its own length."""
        return self.queue_s + self.slots_s + self.full_s

    @property
    def later_s(self) -> float:
        """The seconds by which it is later than on an idle endpoint, without its own prefill."""
        return self.wait_s + self.decode_s

    def known(self, now: float) -> tuple[float, ...]:
        """Return the values for a choice between few endpoints, in the order of `Picker._ranked`."""
        load = self.candidate.load
        reserved, in_flight = load.reservations, load.in_flight(now)
        flying = len(reserved) if in_flight is None else in_flight
        cached = self.candidate.cached_tokens
        return cached, self.wait_s, self.later_s, self.cost_s, flying, reserved.arrivals, reserved.arrived_at

    @property
    def terms(self) -> dict[str, float]:
        """All terms by name, for explanations."""
        candidate = self.candidate
        named = {name: getattr(self, name) for name in self.__struct_fields__ if name.endswith("_s")}
        return {
            "queued_tokens": self.queued_tokens,
            "cached_tokens": candidate.cached_tokens,
            "confirmed_tokens": candidate.hit.tokens,
            "uncached_tokens": candidate.uncached_tokens,
            "host_tokens": candidate.host_tokens,
            "disk_tokens": candidate.disk_tokens,
            "rate": candidate.rate,
            **named,
        }


def score(candidate: Candidate, now: float) -> Scored:
    """Return the cost of one endpoint. O(1) but for reservations newer than the last report."""
    load, rate = candidate.load, candidate.rate
    queued_tokens, queued_requests = load.queue(now)
    report = load.report if load.fresh(now) else None
    queue_s = queued_tokens / rate
    prefill_s = candidate.uncached_tokens / rate
    loads = candidate.host_tokens, candidate.disk_tokens
    load_s = float(_load_s(np.array(loads), load.host_rate, load.disk_rate, rate)) if any(loads) else 0.0
    slots_s = _slots_s(report, queued_requests) if report is not None else 0.0
    decode_s = _decode_s(candidate, report) if report is not None else 0.0
    evict_s = _evict_s(candidate, report, queued_tokens) if report is not None else 0.0
    full_s = max(0.0, load.overloaded_until - now)
    per_s = arrivals_per_s(load.reservations.arrivals, load.reservations.arrived_at, now)
    others_s = prefill_s * (DELAYED_REQUESTS + per_s * (queue_s + 0.5 * prefill_s))
    if candidate.fork and report is not None:
        others_s += max(0.0, _slots_s(report, queued_requests + candidate.fork - 1) - slots_s)
    ttft_s = queue_s + prefill_s + load_s + slots_s + full_s
    cost_s = ttft_s + decode_s + others_s + evict_s
    terms = queued_tokens, queue_s, prefill_s, load_s, slots_s, full_s, decode_s, others_s, evict_s
    return Scored(candidate, cost_s, ttft_s, *terms)


def _load_s(loads: Floats, host_rate: Floats | float, disk_rate: Floats | float, rate: Floats | float) -> Floats:
    """Return the time to load so many tokens from host memory and from disk, of one endpoint or of each. `rate` is the
    prefill's; the others are 0 where they are unknown.
    """
    host_rates = np.where(host_rate, np.maximum(host_rate, rate), HOST_SPEED * rate)
    disk_rates = np.where(disk_rate, np.maximum(disk_rate, rate), DISK_SPEED * rate)
    loads_s: Floats = loads[0] / host_rates + loads[1] / disk_rates
    return loads_s


def _slots_s(report: Report, queued_requests: int) -> float:
    """Return the time until a running slot is free: if all are busy, one is freed each (output × a token's time ÷
    slots).
    """
    excess = report.running + queued_requests + 1 - report.max_running
    if excess <= 0 or not report.max_running:
        return 0.0
    return excess * ASSUMED_OUTPUT_TOKENS * report.token_s / report.max_running


def _decode_s(candidate: Candidate, report: Report) -> float:
    """Return by how much the output takes longer than on the same endpoint with little to do."""
    return DECODE_WEIGHT * candidate.output_tokens * candidate.load.slower_s(report)


def _evict_s(candidate: Candidate, report: Report, queued_tokens: int) -> float:
    """Return the work to do again: tokens evicted to make room × the chance that they would have been hit ÷ rate.

    With hit share h, each token that was computed was hit h / (1 − h) times before it left the cache; the oldest
    tokens, which leave first, are worth TAIL_VALUE of that, and never more than one recomputation.
    """
    if not report.tokens_total:
        return 0.0
    room = report.tokens_total - max(report.tokens_held, candidate.held_tokens) - queued_tokens
    added = candidate.uncached_tokens + candidate.host_tokens + candidate.disk_tokens
    evicted = min(added, added - room)
    if evicted <= 0:
        return 0.0
    hit = min(candidate.load.hit_share, 0.99)
    return evicted * min(1.0, TAIL_VALUE * hit / (1.0 - hit)) / candidate.rate


def follow_s(arrivals: Floats, arrived_at: Floats, later_s: Floats, now: float) -> Floats:
    """Return the term of all candidates: the followers of the last `ARRIVALS_S` seconds × their longer wait.

    `arrivals` and `arrived_at` are those of `Reservations`; `later_s` as in `Scored`. All are by endpoint.
    """
    longer_s: Floats = later_s - later_s.min()
    if not longer_s.any():
        return longer_s
    per_s = arrivals_per_s(arrivals, arrived_at, now)
    cost_s: Floats = FOLLOWERS * ARRIVALS_S * np.maximum(0.0, per_s - per_s.sum() / len(per_s)) * longer_s
    return cost_s


def with_terms(scored: Scored, followers_s: float, adapter_s: float) -> Scored:
    """Return the score with the term that needs a comparison, and that of the request's adapter."""
    if not followers_s and not adapter_s:
        return scored
    ttft_s, cost_s = scored.ttft_s + adapter_s, scored.cost_s + followers_s + adapter_s
    return replace(scored, ttft_s=ttft_s, follow_s=followers_s, adapter_s=adapter_s, cost_s=cost_s)


def waits_and_costs(
    columns: Floats,
    rates: Floats,
    uncached_tokens: Floats | float,
    output_tokens: int,
    now: float,
    fork: int = 0,
    loads: Floats | None = None,
) -> tuple[Floats, Floats, Floats]:
    """Return `(wait_s, later_s, cost_s)` of many endpoints, equal to `score` of each to the last bit.

    `columns` are those of `table.Table`, `rates` and `uncached_tokens` are by endpoint, `loads` as of `Work.held_at`.
    """
    prefill_s = uncached_tokens / rates
    wait_s = columns[QUEUED_TOKENS] / rates
    cost_s = wait_s + prefill_s
    if loads is not None:
        cost_s += _load_s(loads, columns[HOST_RATE], columns[DISK_RATE], rates)
    per_s = arrivals_per_s(columns[ARRIVALS], columns[ARRIVED_AT], now)
    others_s = prefill_s * (DELAYED_REQUESTS + per_s * (wait_s + 0.5 * prefill_s))
    slots_s = _waits_for_slots(columns, 1)
    if slots_s is not None:
        wait_s += slots_s
        cost_s += slots_s
    full_s = columns[FULL_UNTIL] - now
    at = (full_s > 0.0).nonzero()[0]
    if len(at):
        wait_s[at] += full_s[at]
        cost_s[at] += full_s[at]
    decode_s = DECODE_WEIGHT * output_tokens * columns[SLOWER_S]
    later_s = wait_s + decode_s
    cost_s += decode_s
    if fork and (last_s := _waits_for_slots(columns, fork)) is not None:
        others_s = others_s + np.maximum(0.0, last_s - (0.0 if slots_s is None else slots_s))
    cost_s += others_s
    evicted = (uncached_tokens if loads is None else uncached_tokens + loads[0] + loads[1]) - columns[FREE_TOKENS]
    at = (evicted > 0.0).nonzero()[0]
    if len(at):
        hit = np.minimum(columns[HIT_SHARE, at], 0.99)
        cost_s[at] += evicted[at] * np.minimum(1.0, TAIL_VALUE * hit / (1.0 - hit)) / rates[at]
    return wait_s, later_s, cost_s


def _waits_for_slots(columns: Floats, requests: int) -> Floats | None:
    """Return the `_slots_s` of the last of this many requests. None: no endpoint makes it wait."""
    excess = columns[EXCESS] + float(requests)
    at = (excess > 0.0).nonzero()[0]
    if not len(at):
        return None
    waits_s: Floats = np.zeros(len(excess))
    waits_s[at] = excess[at] * ASSUMED_OUTPUT_TOKENS * columns[TOKEN_S, at] / columns[MAX_RUNNING, at]
    return waits_s


class Work(Struct, frozen=True, gc=False):
    """The work of a request at an endpoint: see `Request`. `per_byte` is tokens per byte of its key.

    The tokens of the part of the key that an endpoint holds are known; the rest is estimated by its bytes.
    """

    prompt_tokens: int
    per_byte: float
    output_tokens: int
    fork: int = 0

    @classmethod
    def of(cls, request: Request, matches: Iterable[Match] = ()) -> Self:
        """Return the work of this request, with the index's matches of its key."""
        prompt_tokens = max(1, request.prompt_tokens_estimate)
        key_tokens = request.key_tokens_estimate
        key_tokens = prompt_tokens if key_tokens is None else max(1, key_tokens)
        per_byte = key_tokens / len(request.key) if request.key else 0.0
        known = NO_HIT
        for match in matches:
            longest = match.longest
            if longest.tokens > known.tokens:
                known = longest
        most = request.max_output_tokens if not request.fork else None  # its children's outputs count instead
        return cls(
            max(known.tokens + 1, prompt_tokens + known.tokens - int(known.end * per_byte)),
            per_byte,
            ASSUMED_OUTPUT_TOKENS if most is None else min(most, ASSUMED_OUTPUT_TOKENS),
            request.fork,
        )

    def cached(self, hit: Hit) -> int:
        """Return the prompt tokens that an endpoint with this hit has on its device, or will."""
        return min(hit.tokens + int((hit.reach - hit.end) * self.per_byte), self.prompt_tokens - 1)

    def held(self, hit: Hit) -> tuple[int, int, int]:
        """Return the prompt tokens that an endpoint with this hit need not compute, and how many of them it must load
        from host memory, and from disk.
        """
        cached = self.cached(hit)
        if not hit.host and not hit.disk:
            return cached, 0, 0
        most = self.prompt_tokens - 1
        host = max(0, min(hit.host, most) - cached)
        disk = max(0, min(hit.disk, most) - cached - host)
        return cached + host + disk, host, disk

    def held_at(
        self, index: Index, matches: Mapping[str, Match], rows: Rows, table: Table
    ) -> tuple[Floats, Floats | None]:
        """Return the same for each endpoint in these rows of the table: the tokens, and those to load, of shape (2,
        rows); None if there are no lower tiers.
        """
        cached: Floats = np.zeros(table.size)
        tiers: Floats | None = None
        for match in matches.values():
            hits = [(level_hit(level), level.pods) for level in match.levels if level.tokens or level.reach]
            hits.sort(key=lambda held: (held[0].reach, held[0].tokens))
            for hit, pods in hits:  # the longest last: it counts if a row has several pods
                cached[index.holders(pods)] = self.cached(hit)
            for tier, levels in match.lower.items():
                tiers = np.zeros((2, table.size)) if tiers is None else tiers
                for level in reversed(levels):  # the longest last, too
                    tiers[0 if tier is Tier.HOST else 1, index.holders(level.pods)] = level.tokens
            for pod in match.special:
                _, hit = table.at_row(pod.row).best_hit(match)
                cached[pod.row] = self.cached(hit)
                if tiers is not None:
                    tiers[:, pod.row] = hit.host, hit.disk
        if len(rows) < table.size:
            cached, tiers = cached[rows], None if tiers is None else tiers[:, rows]
        if tiers is None:
            return cached, None
        loads: Floats = np.minimum(tiers, self.prompt_tokens - 1) - cached
        loads[0] = np.maximum(0.0, loads[0])
        loads[1] = np.maximum(0.0, loads[1] - loads[0])
        return cached + loads[0] + loads[1], loads
