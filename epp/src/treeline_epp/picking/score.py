"""What a request would cost at each endpoint, in seconds.

The cost of a candidate is a sum of named terms. The first four are its predicted time to first token:

    queue_s    uncached tokens before it ÷ prefill rate
    prefill_s  its own uncached tokens ÷ prefill rate
    slots_s    if all running slots are taken: time until enough of them come free
    full_s     if the endpoint just refused a request for want of room: the wait until it may take one

The others are what it costs later, itself and those who come after:

    decode_s   its output ÷ the endpoint's decode speed, beyond what the endpoint needs when it is nearly idle, a
               quarter of it (`DECODE_WEIGHT`). Without this term requests that share a prefix and have short prompts
               but long outputs would all run on one endpoint, whose prefill queue is always empty
    others_s   what its prefill costs those who come before it is done: each of them waits for it, those who come while
               it waits for all of it, those who come while it is computed for half of it, on average. How many come is
               measured at each endpoint (`reservations.arrivals_per_s`); one more, the next, is assumed: a burst on one
               new prefix would else compute it on every endpoint, each a little sooner than waiting for the first.
               Where it says how many requests like it will follow (`fork`): until the last of them has a running slot,
               too
    evict_s    if pages are nearly full: work that must be done again for what it would evict
    follow_s   at an endpoint that gets more than its share of requests, what this costs those who follow: each waits
               longer there than at the best endpoint. It holds what many ask for, and a second holder would take some
               of them. Known only beside the other candidates (`follow_s`, the function)

What running requests cost a prefill needs no term: prefill rates are measured with the decodes that share their steps.

The costs of many candidates are computed in arrays (`waits_and_costs`); those that come out best are scored one by one
(`score`), for their terms. Few candidates are all scored one by one.
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
from treeline_epp.index.pods import NO_HIT, Hit, Match, level_hit
from treeline_epp.picking.request import Request
from treeline_epp.picking.table import (
    ARRIVALS,
    ARRIVED_AT,
    EXCESS,
    FREE_TOKENS,
    FULL_UNTIL,
    HIT_SHARE,
    MAX_RUNNING,
    QUEUED_TOKENS,
    SLOWER_S,
    STEP_S,
    Floats,
    Rows,
    Table,
)

if TYPE_CHECKING:  # the index brings the chat templates, and help needs neither
    from treeline_epp.index.index import Index

DELAYED_REQUESTS = 1.0
"""How many later requests the work of this one is assumed to delay, beside those that the arrival rate tells of."""
ASSUMED_OUTPUT_TOKENS = 64
"""Output tokens that a request is assumed to have before it, for want of knowledge: a running one, and a new one that
does not allow fewer."""
DECODE_WEIGHT = 0.25
"""Of a second by which its output takes longer, beside one until its first token. First tokens alone would make it 3
steps of 64: it waits for half a step and is computed in one; and those who come while its output is written are, by
Little's law, as many as run there, so that it delays their first tokens by as much in all. The rest is for outputs. The
more, the sooner requests leave their prefix to spread decodes, and compute it again, which delays the outputs that run
there; the less, the longer outputs gather where they are slow."""
FOLLOWERS = 0.1
"""Of the requests that an endpoint gets beyond the mean, those that a second holder of what this one shares would take.
The more, the sooner what many ask for is computed on several endpoints; the less, the longer some endpoints are busy
and others idle."""
TAIL_VALUE = 0.5
"""The oldest cached tokens are worth less than the average ones: this share."""


class Candidate(Struct, frozen=True):
    """An eligible endpoint and all that its score depends on. `rate` is prefill tokens per second; `hit` what the index
    says of the prompt, `cached_tokens` what it comes to with predictions. `output_tokens` are expected of the request.
    `held_tokens` are known to be in its cache. `rank` is the rank that the hit is at. `fork` requests will follow it.
    """

    spec: EndpointSpec
    load: EndpointLoad
    rate: float
    hit: Hit = NO_HIT
    cached_tokens: int = 0
    uncached_tokens: int = 0
    output_tokens: int = ASSUMED_OUTPUT_TOKENS
    held_tokens: int = 0
    rank: int = 0
    fork: int = 0


class Scored(Struct, frozen=True):
    """A candidate with its cost, term by term; see the module. `cost_s` is what is compared."""

    candidate: Candidate
    cost_s: float
    ttft_s: float = 0.0
    queued_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    slots_s: float = 0.0
    full_s: float = 0.0
    decode_s: float = 0.0
    others_s: float = 0.0
    evict_s: float = 0.0
    follow_s: float = 0.0

    @property
    def wait_s(self) -> float:
        """Until its own prefill begins: what others cost it, and not its own length."""
        return self.queue_s + self.slots_s + self.full_s

    @property
    def later_s(self) -> float:
        """By how much it is later than on an idle endpoint, but for its own prefill."""
        return self.wait_s + self.decode_s

    def known(self, now: float) -> tuple[float, ...]:
        """What a choice between few endpoints is made of, as `Picker._ranked` reads it."""
        load = self.candidate.load
        reserved, in_flight = load.reservations, load.in_flight(now)
        flying = len(reserved) if in_flight is None else in_flight
        cached = self.candidate.cached_tokens
        return cached, self.wait_s, self.later_s, self.cost_s, flying, reserved.arrivals, reserved.arrived_at

    @property
    def terms(self) -> dict[str, float]:
        """All of it by name, for explanations."""
        candidate = self.candidate
        named = {name: getattr(self, name) for name in self.__struct_fields__ if name.endswith("_s")}
        return {
            "queued_tokens": self.queued_tokens,
            "cached_tokens": candidate.cached_tokens,
            "confirmed_tokens": candidate.hit.tokens,
            "uncached_tokens": candidate.uncached_tokens,
            "rate": candidate.rate,
            **named,
        }


def score(candidate: Candidate, now: float) -> Scored:
    """The cost of one endpoint. O(1) but for reservations newer than the last report."""
    load, rate = candidate.load, candidate.rate
    queued_tokens, queued_requests = load.queue(now)
    report = load.report if load.fresh(now) else None
    queue_s = queued_tokens / rate
    prefill_s = candidate.uncached_tokens / rate
    slots_s = _slots_s(report, queued_requests) if report is not None else 0.0
    decode_s = _decode_s(candidate, report) if report is not None else 0.0
    evict_s = _evict_s(candidate, report, queued_tokens) if report is not None else 0.0
    full_s = max(0.0, load.overloaded_until - now)
    per_s = arrivals_per_s(load.reservations.arrivals, load.reservations.arrived_at, now)
    others_s = prefill_s * (DELAYED_REQUESTS + per_s * (queue_s + 0.5 * prefill_s))
    if candidate.fork and report is not None:
        others_s += max(0.0, _slots_s(report, queued_requests + candidate.fork - 1) - slots_s)
    ttft_s = queue_s + prefill_s + slots_s + full_s
    cost_s = ttft_s + decode_s + others_s + evict_s
    terms = queued_tokens, queue_s, prefill_s, slots_s, full_s, decode_s, others_s, evict_s
    return Scored(candidate, cost_s, ttft_s, *terms)


def _slots_s(report: Report, queued_requests: int) -> float:
    """Time until a running slot is free: with all `max_running` busy, one comes free each (output × step ÷ slots)."""
    excess = report.running + queued_requests + 1 - report.max_running
    if excess <= 0 or not report.max_running:
        return 0.0
    return excess * ASSUMED_OUTPUT_TOKENS * report.decode_step_s / report.max_running


def _decode_s(candidate: Candidate, report: Report) -> float:
    """How much longer the output takes than on the same endpoint with little to do."""
    return DECODE_WEIGHT * candidate.output_tokens * candidate.load.slower_s(report)


def _evict_s(candidate: Candidate, report: Report, queued_tokens: int) -> float:
    """Work that comes back: tokens evicted to make room × the chance that they would have been hit ÷ rate.

    With hit share h, each token that was computed was hit h / (1 − h) times before it left the cache; the oldest
    tokens, which leave first, are worth TAIL_VALUE of that, and never more than one recomputation.
    """
    if not report.tokens_total:
        return 0.0
    room = report.tokens_total - max(report.tokens_held, candidate.held_tokens) - queued_tokens
    evicted = min(candidate.uncached_tokens, candidate.uncached_tokens - room)
    if evicted <= 0:
        return 0.0
    hit = min(candidate.load.hit_share, 0.99)
    return evicted * min(1.0, TAIL_VALUE * hit / (1.0 - hit)) / candidate.rate


def follow_s(arrivals: Floats, arrived_at: Floats, later_s: Floats, now: float) -> Floats:
    """The term of all candidates: the followers of the last `ARRIVALS_S` seconds × what each waits more than elsewhere.

    `arrivals` and `arrived_at` are those of `Reservations`; `later_s` as in `Scored`. All are by endpoint.
    """
    longer_s: Floats = later_s - later_s.min()
    if not longer_s.any():
        return longer_s
    per_s = arrivals_per_s(arrivals, arrived_at, now)
    cost_s: Floats = FOLLOWERS * ARRIVALS_S * np.maximum(0.0, per_s - per_s.sum() / len(per_s)) * longer_s
    return cost_s


def with_followers(scored: Scored, followers_s: float) -> Scored:
    """The score with the term that only a comparison knows."""
    return replace(scored, follow_s=followers_s, cost_s=scored.cost_s + followers_s) if followers_s else scored


def waits_and_costs(
    columns: Floats, rates: Floats, uncached_tokens: Floats | float, output_tokens: int, now: float, fork: int = 0
) -> tuple[Floats, Floats, Floats]:
    """`(wait_s, later_s, cost_s)` of many endpoints: what `score` says of each, to the last bit.

    `columns` are those of `table.Table`, `rates` and `uncached_tokens` are by endpoint.
    """
    prefill_s = uncached_tokens / rates
    wait_s = columns[QUEUED_TOKENS] / rates
    cost_s = wait_s + prefill_s
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
    evicted = uncached_tokens - columns[FREE_TOKENS]
    at = (evicted > 0.0).nonzero()[0]
    if len(at):
        hit = np.minimum(columns[HIT_SHARE, at], 0.99)
        cost_s[at] += evicted[at] * np.minimum(1.0, TAIL_VALUE * hit / (1.0 - hit)) / rates[at]
    return wait_s, later_s, cost_s


def _waits_for_slots(columns: Floats, requests: int) -> Floats | None:
    """As `_slots_s`, for the last of so many requests. None: no endpoint makes it wait."""
    excess = columns[EXCESS] + float(requests)
    at = (excess > 0.0).nonzero()[0]
    if not len(at):
        return None
    waits_s: Floats = np.zeros(len(excess))
    waits_s[at] = excess[at] * ASSUMED_OUTPUT_TOKENS * columns[STEP_S, at] / columns[MAX_RUNNING, at]
    return waits_s


class Work(Struct, frozen=True, gc=False):
    """What a request asks of an endpoint: see `Request`. `per_byte` is tokens per byte of its key.

    As far as any endpoint holds the key, its tokens are known; the rest is estimated by its bytes.
    """

    prompt_tokens: int
    per_byte: float
    output_tokens: int
    fork: int = 0

    @classmethod
    def of(cls, request: Request, matches: Iterable[Match] = ()) -> Self:
        """Of this request, with what the index says of its key."""
        prompt_tokens = max(1, request.prompt_tokens_estimate)
        key_tokens = request.key_tokens_estimate
        key_tokens = prompt_tokens if key_tokens is None else max(1, key_tokens)
        per_byte = key_tokens / len(request.key) if request.key else 0.0
        known = NO_HIT
        for match in matches:
            longest = match.longest
            if longest.tokens > known.tokens:
                known = longest
        most = request.max_output_tokens if not request.fork else None  # it is its children's outputs that count
        return cls(
            max(known.tokens + 1, prompt_tokens + known.tokens - int(known.end * per_byte)),
            per_byte,
            ASSUMED_OUTPUT_TOKENS if most is None else min(most, ASSUMED_OUTPUT_TOKENS),
            request.fork,
        )

    def cached(self, hit: Hit) -> int:
        """Tokens of the prompt that need not be computed where an endpoint has this hit."""
        return min(hit.tokens + int((hit.reach - hit.end) * self.per_byte), self.prompt_tokens - 1)

    def cached_at(self, index: Index, matches: Mapping[str, Match], rows: Rows, table: Table) -> Floats:
        """The same of each of the endpoints in these rows of the table."""
        cached: Floats = np.zeros(table.size)
        for match in matches.values():
            hits = [(level_hit(level), level.pods) for level in match.levels if level.tokens or level.reach]
            for hit, pods in sorted(hits, key=_how_far):  # the longest last: it counts where a row has several pods
                cached[index.holders(pods)] = self.cached(hit)
            for pod in match.special:
                _, hit = table.at_row(pod.row).best_hit(match)
                cached[pod.row] = self.cached(hit)
        return cached if len(rows) == table.size else cached[rows]


def _how_far(held: tuple[Hit, int]) -> tuple[int, int]:
    return held[0].reach, held[0].tokens
