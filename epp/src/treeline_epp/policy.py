"""Policies: from candidates to a ranking. `treeline` predicts time to first token; two blind ones to compare with.

Every policy ranks the same candidates, so that health, subset and draining are decided in one place. The cost of a
candidate is a sum of named terms, all in seconds. The first four are its predicted time to first token:

    queue_s    uncached tokens before it ÷ prefill rate
    prefill_s  its own uncached tokens ÷ prefill rate
    slots_s    if all running slots are taken: time until enough of them come free
    full_s     if the endpoint just refused a request for want of room: the wait until it may take one

The others are what it costs later, itself and those who come after:

    decode_s   its output ÷ the endpoint's decode speed, beyond what the endpoint needs when it is nearly idle. Without
               this term requests that share a prefix and have short prompts but long outputs would all run on one
               endpoint, whose prefill queue is always empty
    others_s   its own prefill again: while it is computed, the next request waits. Without this term a burst on one new
               prefix would compute it on every endpoint, each a little sooner than waiting for the first
    evict_s    if pages are nearly full: work that must be done again for what it would evict

What running requests cost a prefill needs no term: prefill rates are measured with the decodes that share their steps.
"""

import random
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from treeline_epp.endpoint import EndpointSpec
from treeline_epp.index import NO_HIT, Hit
from treeline_epp.load import EndpointLoad, Report

#: Scores closer than this are equal; the choice among equals is random, so that idle endpoints share the load.
EQUAL_S = 0.001
#: A worse endpoint with more of the prompt cached is kept while it is worse by no more than this (sticky until
#: saturated): a few milliseconds are below what predictions can tell, a moved prefix costs memory for minutes.
STICKY_S = 0.005
STICKY_SHARE = 0.10
#: How many later requests the work of this one is assumed to delay.
DELAYED_REQUESTS = 1.0
#: Output tokens that a request is assumed to have before it, for want of knowledge: a running one, and a new one that
#: does not allow fewer.
ASSUMED_OUTPUT_TOKENS = 64
#: The oldest cached tokens are worth less than the average ones: this share.
TAIL_VALUE = 0.5


class Candidate(Struct, frozen=True):
    """An eligible endpoint and all that its score depends on. `rate` is prefill tokens per second; `hit` what the index
    says of the prompt, `cached_tokens` what it comes to with predictions. `output_tokens` are expected of the request.
    `held_tokens` are known to be in its cache.
    """

    spec: EndpointSpec
    load: EndpointLoad
    rate: float
    hit: Hit = NO_HIT
    cached_tokens: int = 0
    uncached_tokens: int = 0
    output_tokens: int = ASSUMED_OUTPUT_TOKENS
    held_tokens: int = 0


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

    @property
    def wait_s(self) -> float:
        """Until its own prefill begins: what others cost it, and not its own length."""
        return self.queue_s + self.slots_s + self.full_s

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
    others_s = DELAYED_REQUESTS * prefill_s
    ttft_s = queue_s + prefill_s + slots_s + full_s
    return Scored(
        candidate,
        ttft_s + decode_s + others_s + evict_s,
        ttft_s,
        queued_tokens,
        queue_s,
        prefill_s,
        slots_s,
        full_s,
        decode_s,
        others_s,
        evict_s,
    )


def _slots_s(report: Report, queued_requests: int) -> float:
    """Time until a running slot is free: with all `max_running` busy, one comes free each (output × step ÷ slots)."""
    excess = report.running + queued_requests + 1 - report.max_running
    if excess <= 0 or not report.max_running:
        return 0.0
    return excess * ASSUMED_OUTPUT_TOKENS * report.decode_step_s / report.max_running


def _decode_s(candidate: Candidate, report: Report) -> float:
    """How much longer the output takes than on the same endpoint with little to do. Idle endpoints report old steps."""
    if not report.running:
        return 0.0
    return candidate.output_tokens * max(0.0, report.decode_step_s - candidate.load.fastest_step_s)


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


class Policy(Protocol):
    """Ranks candidates, best first. Never returns fewer than it was given."""

    name: str

    def rank(self, scored: Sequence[Scored]) -> list[Scored]:
        """Order `scored` (not empty) by preference."""
        ...


class TreelinePolicy:
    """Least cost, sticky until saturated."""

    name = "treeline"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def rank(self, scored: Sequence[Scored]) -> list[Scored]:
        """O(n log n). Ties within `EQUAL_S` fall at random; stickiness is in the module's constants."""
        order = sorted(scored, key=_cost)
        best = order[0].cost_s
        limit = best + max(STICKY_S, STICKY_SHARE * best)
        most_cached = order[0].candidate.cached_tokens
        chosen: list[int] = []
        for place, s in enumerate(order):
            if s.cost_s > limit:
                break
            if s.candidate.cached_tokens > most_cached:
                most_cached, chosen = s.candidate.cached_tokens, [place]
            elif s.candidate.cached_tokens == most_cached:
                cheapest = order[chosen[0]] if chosen else s
                if s.cost_s <= cheapest.cost_s + EQUAL_S:
                    chosen.append(place)
        first = order.pop(chosen[0] if len(chosen) == 1 else self._rng.choice(chosen))
        return [first, *order]


class RoundRobinPolicy:
    """One after the other, by name, whatever they hold or do."""

    name = "round_robin"

    def __init__(self, rng: random.Random) -> None:
        self._next = rng.randrange(1 << 16)

    def rank(self, scored: Sequence[Scored]) -> list[Scored]:
        """O(n log n)."""
        order = sorted(scored, key=lambda s: s.candidate.spec.name)
        start = self._next % len(order)
        self._next += 1
        return order[start:] + order[:start]


class RandomPolicy:
    """Any of them, evenly."""

    name = "random"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def rank(self, scored: Sequence[Scored]) -> list[Scored]:
        """O(n)."""
        order = list(scored)
        self._rng.shuffle(order)
        return order


def _cost(scored: Scored) -> float:
    return scored.cost_s


POLICIES: dict[str, Callable[[random.Random], Policy]] = {
    TreelinePolicy.name: TreelinePolicy,
    RoundRobinPolicy.name: RoundRobinPolicy,
    RandomPolicy.name: RandomPolicy,
}


def create_policy(name: str, rng: random.Random) -> Policy:
    """A policy by name. Raises ValueError that lists the valid names."""
    try:
        return POLICIES[name](rng)
    except KeyError:
        raise ValueError(f"unknown policy {name!r}; valid: {', '.join(sorted(POLICIES))}") from None
