"""The picker's choice, one endpoint after another: slow, and obvious. The fast one must agree with it."""

from __future__ import annotations

import random

from msgspec.structs import replace
from treeline_epp.endpoints.load import prefill_rate, trust
from treeline_epp.endpoints.reservations import ARRIVALS_S, arrivals_per_s
from treeline_epp.endpoints.spec import split_address
from treeline_epp.index.pods import NO_HIT, Hit
from treeline_epp.picking.decision import NoEndpoints
from treeline_epp.picking.endpoint import Endpoint
from treeline_epp.picking.picker import Picker
from treeline_epp.picking.policies.predicted_ttft import STICKY_S, STICKY_SHARE
from treeline_epp.picking.request import Request
from treeline_epp.picking.score import ASSUMED_OUTPUT_TOKENS, FOLLOWERS, Candidate, Scored, score, with_terms


def serves(endpoint: Endpoint, request: Request) -> bool:
    spec = endpoint.spec
    if request.pool is not None and spec.pool != request.pool:
        return False
    return not spec.models or request.model is None or request.model in spec.models


def eligible(picker: Picker, request: Request, now: float) -> list[Endpoint]:
    serving = [e for e in picker.endpoints.values() if e.eligible and serves(e, request)]
    if serving and request.subset is not None:
        allowed = {split_address(entry) for entry in request.subset}
        places = {e.spec.name: split_address(e.spec.address) for e in serving}
        serving = [e for e in serving if {places[e.spec.name], (places[e.spec.name][0], "")} & allowed]
    if not serving:
        raise NoEndpoints("no endpoint")
    willing = [e for e in serving if now >= e.breaker.closed_until and not e.load.silent(now)]
    return willing or serving


def candidates(picker: Picker, request: Request, now: float) -> list[Candidate]:
    endpoints = eligible(picker, request, now)
    fastest = max(endpoint.load.own_rate() for endpoint in endpoints)
    prompt_tokens = max(1, request.prompt_tokens_estimate)
    key_tokens = prompt_tokens if request.key_tokens_estimate is None else max(1, request.key_tokens_estimate)
    per_byte = key_tokens / len(request.key) if request.key else 0.0
    known = NO_HIT
    for scope in {endpoint.pod.scope for endpoint in picker.endpoints.values() if serves(endpoint, request)}:
        match = picker.index.match(scope, request.namespace, request.key or b"", now)
        for level in [*match.levels, *(level for levels in match.lower.values() for level in levels)]:
            if level.tokens > known.tokens:
                known = Hit(level.tokens, level.end, level.end)
    prompt = max(known.tokens + 1, prompt_tokens + known.tokens - int(known.end * per_byte))
    most = None if request.fork else request.max_output_tokens
    found = []
    for endpoint in endpoints:
        load, rank, hit, most_host, most_disk = endpoint.load, 0, NO_HIT, 0, 0
        if request.key:
            match = picker.index.match(endpoint.pod.scope, request.namespace, request.key, now)
            for at, pod in enumerate(endpoint.pods):
                of_rank = match.hit(pod)
                if (of_rank.reach, of_rank.tokens) > (hit.reach, hit.tokens):
                    rank, hit = at, of_rank
                most_host, most_disk = max(most_host, of_rank.host), max(most_disk, of_rank.disk)
        device = min(hit.tokens + int((hit.reach - hit.end) * per_byte), prompt - 1)
        in_host = max(device, min(most_host, prompt - 1))
        cached = max(in_host, min(most_disk, prompt - 1))
        found.append(
            Candidate(
                spec=endpoint.spec,
                load=load,
                rate=prefill_rate(load.own_rate(), trust(load.rate_samples, load.measured_at, now), fastest),
                hit=replace(hit, host=most_host, disk=most_disk),
                cached_tokens=cached,
                uncached_tokens=prompt - cached,
                host_tokens=in_host - device,
                disk_tokens=cached - in_host,
                output_tokens=ASSUMED_OUTPUT_TOKENS if most is None else min(most, ASSUMED_OUTPUT_TOKENS),
                held_tokens=sum(pod.blocks * pod.block_size for pod in endpoint.pods),
                rank=rank,
                fork=request.fork,
            )
        )
    return found


def scores(picker: Picker, request: Request, now: float) -> list[Scored]:
    """Score all candidates."""
    return [score(candidate, now) for candidate in candidates(picker, request, now)]


def roomy(picker: Picker, scored: list[Scored], limit_s: float | None, limit: int | None, now: float) -> list[Scored]:
    """Return the candidates with room: shorter waits and fewer requests than the limits."""
    found = []
    for one in scored:
        endpoint = picker.endpoints[one.candidate.spec.name]
        load = endpoint.load
        reported = load.report.running + load.queue(now)[1] if load.report is not None and load.fresh(now) else 0
        fewer = limit is None or max(reported, endpoint.unanswered) < limit
        if fewer and (limit_s is None or one.wait_s <= limit_s):
            found.append(one)
    return found


def with_all_followers(scored: list[Scored], now: float) -> list[Scored]:
    """Add to each candidate the cost of its followers, the requests that would come after it."""
    held = [one.candidate.load.reservations for one in scored]
    per_s = [arrivals_per_s(one.arrivals, one.arrived_at, now) for one in held]
    soonest = min(one.later_s for one in scored)
    found = []
    for one, own_per_s in zip(scored, per_s, strict=True):
        followers = FOLLOWERS * ARRIVALS_S * max(0.0, own_per_s - sum(per_s) / len(per_s))
        found.append(with_terms(one, followers * (one.later_s - soonest), 0.0))
    return found


def rank(scored: list[Scored], rng: random.Random, now: float) -> list[Scored]:
    """Order by least cost, sticky until saturated; then by fewest requests, at random among equals."""
    order = sorted(scored, key=lambda s: s.cost_s)
    best = order[0].cost_s
    near = [s for s in order if s.cost_s <= best + max(STICKY_S, STICKY_SHARE * best)]
    most_cached = max(s.candidate.cached_tokens for s in near)
    warmest = [s for s in near if s.candidate.cached_tokens == most_cached]

    def requests(one: Scored) -> int:
        load = one.candidate.load
        known = load.in_flight(now)
        return len(load.reservations) if known is None else known

    fewest = min(requests(s) for s in warmest)
    first = rng.choice([s for s in warmest if requests(s) == fewest])
    return [first, *(s for s in order if s is not first)]


def equals_of(scored: list[Scored], now: float) -> set[str]:
    """Return the endpoints among which the slow choice is random."""
    return {rank(scored, _Nth(n), now)[0].candidate.spec.name for n in range(len(scored))}


class _Nth(random.Random):
    def __init__(self, n: int) -> None:
        super().__init__(0)
        self._n = n

    def choice(self, seq):  # type: ignore[no-untyped-def]
        return seq[self._n % len(seq)]
