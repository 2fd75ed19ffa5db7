"""The picker: endpoints and their load, one decision per request, one lease per decision.

Sans-IO: `now` (seconds of any monotonic clock, the same for all calls) is passed in; drivers feed load reports,
readiness and publishers' events, and call `on_tick`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
from msgspec.structs import replace
from treeline_wire.namespaces import with_adapter

from treeline_epp.endpoints.load import EngineLoad, prefill_rate, trust
from treeline_epp.endpoints.scraped import ScrapedLoad
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.index.index import Index
from treeline_epp.index.pods import NO_HIT, Match
from treeline_epp.picking.decision import Decision, Elsewhere, Lease, NoEndpoints, Outcome, PickError, Saturated
from treeline_epp.picking.endpoint import Endpoint, fallbacks
from treeline_epp.picking.explanation import Explanation, dropped_by, explanation
from treeline_epp.picking.filters import Saturation, rows_left
from treeline_epp.picking.pairs import HANDOVER_S, Apart, compared, whole
from treeline_epp.picking.parts import Parts
from treeline_epp.picking.policies import Policy, PoolPolicies
from treeline_epp.picking.policies.base import NO_FLOATS, Candidates, led_by
from treeline_epp.picking.pulls import ASK_S, FEWEST_TOKENS, Pull, pulled
from treeline_epp.picking.request import Request
from treeline_epp.picking.score import Candidate, Scored, Work, follow_s, score, waits_and_costs, with_terms
from treeline_epp.picking.sessions import Sessions, stays
from treeline_epp.picking.table import (
    ARRIVALS,
    ARRIVED_AT,
    IDENTITY,
    IN_FLIGHT,
    MEASURED_AT,
    OWN_RATE,
    RATE_SAMPLES,
    Floats,
    Mask,
    Rows,
    Table,
)

ADAPTER_S = 0.05
"""Cost of an adapter without a slot on the device. The copy takes milliseconds (84 MB for rank 16 of an 8B model), but
it may wait for a slot, and the adapter that leaves it will want one again."""
_FEW = 8
"""Most endpoints that are scored one by one: that is faster than arrays, which take the same for one and hundreds."""


@dataclass(frozen=True, slots=True)
class PickerConfig:
    """The settings of a picker. `policy`: for pools without one, `NAME[:key=value,…]`. `max_ttft_s`: an endpoint is
    saturated when a request would wait longer for its turn; its own prefill is no queue. `fallbacks`: destinations
    after the first. `seed` makes ties reproducible. `saturation`: when an endpoint takes no request; None: when
    saturated, it refuses only sheddable ones. `scored`: how many of the best endpoints a decision describes.
    """

    policy: str = "predicted_ttft"
    max_ttft_s: float = 30.0
    fallbacks: int = 1
    seed: int = 0
    saturation: Saturation | None = None
    scored: int = 3


def _scope(spec: EndpointSpec) -> str:
    """Return the scope of an endpoint: endpoints of the same model share blocks."""
    return spec.models[0] if spec.models else spec.pool


class Picker:
    """Chooses endpoints. `pick` is O(prompt bytes) for the match and O(endpoints) for the ranking, both at memory
    speed: a fraction of a millisecond for a thousand endpoints.
    """

    def __init__(self, config: PickerConfig | None = None, index: Index | None = None) -> None:
        self.config = config or PickerConfig()
        self.index = index or Index()
        self.endpoints: dict[str, Endpoint] = {}
        self.elsewhere: Elsewhere | None = None
        """The exchange with other pickers, if there are any."""
        self._table = Table()
        self.parts = Parts(self.index, self._table, set())
        self._most_ranks = 1  # endpoints of one address, so that the best ones have fallbacks among them
        self.policies = PoolPolicies(self.config.policy, self.config.seed)
        self.sessions = Sessions()

    # Endpoints

    def add_endpoint(self, spec: EndpointSpec, *, ready: bool = True, ranks: int = 1) -> Endpoint:
        """Add an endpoint with `ranks` caches, or replace it by name; a new uid, address or number starts it empty."""
        known = self.endpoints.get(spec.name)
        if known is not None:
            if (known.spec.uid, known.spec.address, len(known.pods)) == (spec.uid, spec.address, ranks):
                self._table.remove(known)
                known.spec = spec
                self._table.add(known)
                return known
            self.remove_endpoint(spec.name)
        self._most_ranks = max(self._most_ranks, spec.ranks)
        row = self._table.take_row()
        names = (spec.name if rank == 0 else f"{spec.name}/{rank}" for rank in range(ranks))
        pods = tuple(self.index.add_pod(name, _scope(spec), row) for name in names)
        endpoint = Endpoint(spec, pods, ready=ready)
        self.endpoints[spec.name] = endpoint
        self._table.add(endpoint)
        return endpoint

    def remove_endpoint(self, name: str) -> None:
        """Forget an endpoint and its entries. Unknown names are ignored."""
        endpoint = self.endpoints.pop(name, None)
        if endpoint is not None:
            self._table.remove(endpoint)
            self._table.give_row(endpoint.pod.row)
            for pod in endpoint.pods:
                self.index.remove_pod(pod)
                pod.row = -1
            self.parts.reserved.discard(endpoint)

    def present(self, specs: Iterable[EndpointSpec]) -> list[Endpoint]:
        """Return those of these endpoints that are known."""
        return [self.endpoints[spec.name] for spec in specs if spec.name in self.endpoints]

    def set_ready(self, name: str, ready: bool) -> None:
        """Set readiness as polled or watched. Unknown names are ignored."""
        endpoint = self.endpoints.get(name)
        if endpoint is not None and endpoint.ready != ready:
            endpoint.ready = ready
            self.parts.touch(endpoint)

    def set_draining(self, name: str, draining: bool) -> None:
        """Set draining as discovery reports it; the load report's own flag counts, too. Unknown names are ignored."""
        endpoint = self.endpoints.get(name)
        if endpoint is not None and endpoint.draining != draining:
            endpoint.draining = draining
            self.parts.touch(endpoint)

    def on_load(self, name: str, load: EngineLoad, now: float) -> None:
        """Take a load report that came at `now`, or was requested then. Unknown names are ignored."""
        endpoint = self.endpoints.get(name)
        if endpoint is not None:
            endpoint.load.on_load(load, now)
            self.parts.touch(endpoint)
            exact = not isinstance(load, ScrapedLoad)  # blocks × size on a page is no bound for hybrid models
            if exact and endpoint.overfull and endpoint.audit.allow(now):
                for pod in endpoint.pods:
                    self.index.request_rebuild(pod)

    def on_tick(self, now: float) -> None:
        """Housekeeping; call about every 100 ms."""
        self.parts.expire(now)
        self.index.tick(now)
        self.sessions.expire(now)

    # Decisions

    def pick(self, request: Request, now: float) -> Decision:
        """Choose an endpoint for a request. Changes only the policy's own state; call `reserve` next. Raises
        NoEndpoints (503), or Saturated (429): for any request if `config.saturation` says so, otherwise for a sheddable
        one alone, while others go to the best of the full endpoints.
        """
        policy, config = self.policies.of(request.pool), self.config
        count = max(config.scored, (config.fallbacks + 2) * self._most_ranks)
        best, scored, apart, pull = self._ranked(request, policy, count, config.scored, now)
        decision = Decision(request, scored, (), policy.name, apart, pull)
        able = [best[0], *(one for one in best[1:] if decision.fits(one.spec))]
        return replace(decision, fallbacks=fallbacks(able, config.fallbacks))

    def explain(self, request: Request, now: float) -> Explanation:
        """Return the decision of `pick`, and each endpoint's part in it. Changes nothing. O(endpoints), one by one."""
        self._refresh(now)
        dropped = dropped_by(request, self._table, now)
        decision: Decision | None = None
        refusal, policy = "", copy.deepcopy(self.policies.of(request.pool))
        try:
            count = len(self.endpoints)
            _, ranked, apart, pull = self._ranked(request, policy, count, count, now)
            decision = Decision(request, ranked, (), policy.name, apart, pull)
        except PickError as error:
            refusal = str(error)
        return explanation(self.policies.name_of(request.pool), self._table, dropped, decision, refusal)

    def _ranked(
        self, request: Request, policy: Policy, count: int, scored: int, now: float
    ) -> tuple[list[Endpoint], tuple[Scored, ...], Apart | None, Pull | None]:
        """Return the best `count`, the scores of the first of them, and whether the best one should compute the
        prompt, or pull a part of it.
        """
        table = self._table
        self._refresh(now)
        rows = rows_left(request, table)
        matches = self._match(request, now)
        work = Work.of(request, matches.values())
        each: list[Scored] = []
        identity = NO_FLOATS  # a policy that needs only costs reads none
        if len(rows) <= _FEW and policy.by_cost and self.config.saturation is None:
            each = self._one_by_one(rows, matches, work, now)
            known = np.array([one.known(now) for one in each], np.float64).T
            cached, wait_s, later_s, cost_s, in_flight, arrivals, arrived_at = known
        else:
            columns = table.take(rows)
            (cached, loads), rates = work.held_at(self.index, matches, rows, table), self._rates(columns, now)
            wait_s, later_s, cost_s = waits_and_costs(
                columns, rates, work.prompt_tokens - cached, work.output_tokens, now, work.fork, loads
            )
            if (room := self._room(columns, wait_s)) is not None:
                rows, columns, rates = rows[room], columns[:, room], rates[room]
                cached, later_s, cost_s = cached[room], later_s[room], cost_s[room]
            identity, in_flight = columns[IDENTITY], columns[IN_FLIGHT]
            arrivals, arrived_at = columns[ARRIVALS], columns[ARRIVED_AT]
        if request.sheddable:
            self._shed(float(wait_s.min()))
        followers_s = follow_s(arrivals, arrived_at, later_s, now)
        slots = table.adapter_slots(request, rows)
        adapter_s = ADAPTER_S * (slots < 0.0)
        cost_s = cost_s + followers_s + adapter_s
        uncached, has_adapter = work.prompt_tokens - cached, partial(table.has_adapter, rows, slots)
        candidates = Candidates(cost_s, cached, uncached, identity, in_flight, has_adapter, now)
        order = policy.rank(request, candidates, count)
        if policy.by_cost and request.session:
            order = self._staying(request.session, rows, cost_s, order, count, now)
        best = [table.at_row(int(rows[at])) for at in order]
        scores = [
            with_terms(
                each[at] if each else score(self._candidate(one, matches, work, float(rates[at])), now),
                float(followers_s[at]),
                float(adapter_s[at]),
            )
            for one, at in zip(best[:scored], order, strict=False)
        ]
        apart = self._apart(request, scores[0], matches, work, now)
        return best, tuple(scores), apart, self._pull(request, scores[0], matches, work, now)

    def _apart(self, request: Request, best: Scored, matches: dict[str, Match], work: Work, now: float) -> Apart | None:
        """Compare computing the prompt at another endpoint; None if there is none, or the prompt is short."""
        rows, alone = self._table.partners(request, best.candidate.spec), best.candidate.spec.alone
        if not len(rows) or (alone and sum(whole(best, now).values()) <= HANDOVER_S):
            return None
        columns, decode = self._table.take(rows), best.candidate
        fastest = max(float(columns[OWN_RATE].max()), decode.load.own_rate())  # unmeasured ones are as fast as others
        cached, loads = work.held_at(self.index, matches, rows, self._table)
        rates = self._rates(columns, now, fastest)
        at = int(waits_and_costs(columns, rates, work.prompt_tokens - cached, 0, now, loads=loads)[2].argmin())
        prefill = self._candidate(self._table.at_row(int(rows[at])), matches, work, float(rates[at]))
        return compared(score(replace(decode, rate=decode.load.rate(fastest, now)), now), score(prefill, now), now)

    def _pull(self, request: Request, best: Scored, matches: dict[str, Match], work: Work, now: float) -> Pull | None:
        """Compare getting a part of the prompt's cache from the endpoint that holds most of it; None if that is not
        much more.
        """
        candidate = best.candidate
        if best.prefill_s <= ASK_S or not len(rows := self._table.lenders(request, candidate.spec)):
            return None
        held, loads = work.held_at(self.index, matches, rows, self._table)
        if loads is not None:
            held = held - loads[1]  # what is on the disk alone is not given
        at = int(held.argmax())
        tokens = int(held[at]) - candidate.cached_tokens
        if tokens < FEWEST_TOKENS:
            return None
        source = self._table.at_row(int(rows[at]))
        return pulled(best, source.spec, source.load, tokens, now)

    def _staying(self, session: int, rows: Rows, cost_s: Floats, order: list[int], count: int, now: float) -> list[int]:
        """Return the order with a session's endpoint first, unless it is no candidate or costs too much."""
        known = self.endpoints.get(self.sessions.endpoint(session, now) or "")
        at = len(rows) if known is None else int(np.searchsorted(rows, known.pod.row))
        if known is None or at == len(rows) or rows[at] != known.pod.row:
            return order
        return led_by(at, order, count) if stays(float(cost_s[at]), float(cost_s[order[0]])) else order

    def _one_by_one(self, rows: Rows, matches: dict[str, Match], work: Work, now: float) -> list[Scored]:
        """Return the scores of few endpoints."""
        few = [self._table.at_row(row) for row in rows.tolist()]
        fastest = max(one.load.own_rate() for one in few)
        return [score(self._candidate(one, matches, work, one.load.rate(fastest, now)), now) for one in few]

    def _shed(self, soonest_s: float) -> None:
        """Raise Saturated for a sheddable request whose earliest turn is too late."""
        limit = self.config.max_ttft_s
        if soonest_s > limit:
            why = f"every endpoint has more than {limit:g} s of work waiting, and requests for this model are sheddable"
            raise Saturated(why, soonest_s - limit)

    def check_room(self, request: Request, now: float) -> None:
        """Check for room: raises NoEndpoints, or Saturated if `config.saturation` says so. Called often while requests
        wait. O(endpoints) at memory speed; it does not read the prompt.
        """
        self._refresh(now)
        columns = self._table.take(rows_left(request, self._table))
        wait_s, _, _ = waits_and_costs(columns, self._rates(columns, now), 0.0, 0, now)
        self._room(columns, wait_s)

    def uncached_tokens(self, request: Request, now: float) -> int:
        """Return the prompt tokens that the endpoint with the longest hit would compute. O(prompt bytes)."""
        matches = self._match(request, now).values()
        longest = max((match.longest for match in matches), key=lambda hit: hit.tokens, default=NO_HIT)
        work = Work.of(request, matches)
        return work.prompt_tokens - work.cached(longest)

    def has_ready(self, pool: str, model: str | None) -> bool:
        """Return whether this pool could serve a request for this model now. O(endpoints) at memory speed."""
        self._refresh(self._table.now)
        try:
            return bool(len(rows_left(Request("", model=model, pool=pool, apart=True), self._table)))
        except NoEndpoints:
            return False

    # Leases

    def reserve(self, decision: Decision, now: float) -> Lease:
        """Open the lease of a decision; the endpoint is at once predicted to hold the prompt. O(prompt bytes). Raises
        NoEndpoints if an endpoint left since; then nothing is counted. Close the lease in a `finally`.
        """
        endpoint, request, prefill = self._present(decision.best), decision.request, decision.prefill
        if prefill is not None:
            prefill_endpoint = self._present(prefill)
        tokens, parts = 0 if prefill is not None else decision.best.candidate.uncached_tokens, self.parts
        lease = Lease(decision, parts.open(request, endpoint, decision.best, tokens, decision.ttft_s, now), now)
        if prefill is not None:
            tokens = prefill.candidate.uncached_tokens
            lease.prefill = parts.open(request, prefill_endpoint, prefill, tokens, prefill.ttft_s, now)
            prefill_endpoint.breaker.on_pick(now)
        if request.session:
            self.sessions.remember(request.session, endpoint.spec.name, now)
        endpoint.unanswered += 1
        endpoint.breaker.on_pick(now)
        self.parts.touch(endpoint)
        if self.elsewhere is not None:
            self.elsewhere.opened(lease, now)
        return lease

    def _present(self, chosen: Scored) -> Endpoint:
        name = chosen.candidate.spec.name
        if name not in self.endpoints:
            raise NoEndpoints(f"endpoint {name} is gone")
        return self.endpoints[name]

    def close(
        self,
        lease: Lease,
        now: float,
        outcome: Outcome,
        *,
        served: str | None = None,
        ttft_s: float | None = None,
        cached_tokens: int | None = None,
        prompt_tokens: int | None = None,
    ) -> bool:
        """End a lease; True the first time, False (and no effect) afterwards.

        `served`: the address that answered, if it is known; feedback counts only where it is the picked endpoint.
        `ttft_s`: seconds from pick to response headers, only if they came with the first token (our streaming
        responses). `cached_tokens` and `prompt_tokens` as the runtime reported them.
        """
        if lease.closed:
            return False
        lease.closed = True
        endpoint = lease.endpoint
        endpoint.unanswered -= 1
        load = endpoint.load
        answered = outcome is Outcome.HEADERS
        other = served if served != endpoint.spec.address else None
        ours, began = Outcome.CANCELLED if other else outcome, ttft_s is not None
        self.parts.discharge(endpoint, lease.answer.reservation, ours, now, began=began)
        if lease.prefill is not None and lease.prefill.cancel is None:
            # It ends when the answer begins; a failure may be the other endpoint's.
            self.parts.prefilled(lease, Outcome.HEADERS if answered else Outcome.CANCELLED, now)
        if self.elsewhere is not None:
            self.elsewhere.closed(lease, ours, began=began)
        if other or not answered:
            self.parts.withdraw(lease.decision.request, lease.answer)
        if other or outcome is Outcome.ERROR:
            self.sessions.forget(lease.decision.request.session, endpoint.spec.name)
        if other:
            if answered:
                self._served_by_other(lease, other, now)
            return True
        if outcome is Outcome.ERROR:
            endpoint.breaker.on_error(now)
        elif outcome is Outcome.REFUSED:
            endpoint.breaker.on_answer()
        elif answered:
            endpoint.breaker.on_answer()
            if lease.decision.request.key:
                endpoint.keyed_prompts += 1
                endpoint.new_tokens += lease.decision.best.candidate.uncached_tokens
            elsewhere = lease.decision.source is not None  # then it says nothing of this endpoint's cache and speed
            if cached_tokens is not None and prompt_tokens is not None and not elsewhere:
                load.train_hits(cached_tokens, prompt_tokens)
                if ttft_s is not None:
                    load.train(max(0, prompt_tokens - cached_tokens), lease.answer.queued_tokens, ttft_s, now)
                lease.audit(self.index, cached_tokens, now)
        return True

    def _served_by_other(self, lease: Lease, address: str, now: float) -> None:
        """Predict the prompt for the endpoint that answered in place of the picked one."""
        request = lease.decision.request
        for row in self._table.at([address]):
            endpoint = self._table.at_row(row)
            if endpoint.spec.address != address or endpoint.spec.rank not in (None, lease.endpoint.spec.rank):
                continue
            if request.session:
                self.sessions.remember(request.session, endpoint.spec.name, now)
            if request.key:
                namespace = request.namespace_at(endpoint.spec)
                self.index.predict(endpoint.expecting(0), namespace, request.key, NO_HIT, now)
            return

    # Inside

    def _rates(self, columns: Floats, now: float, fastest: float | None = None) -> Floats:
        fastest = float(columns[OWN_RATE].max()) if fastest is None else fastest
        return prefill_rate(columns[OWN_RATE], trust(columns[RATE_SAMPLES], columns[MEASURED_AT], now), fastest)

    def _room(self, columns: Floats, wait_s: Floats) -> Mask | None:
        """Return the endpoints with room; None for all. Raises Saturated."""
        saturation = self.config.saturation
        if saturation is None:
            return None
        room = saturation.room(columns, wait_s)
        if not room.any():
            why = "every endpoint that may serve this request is full"
            raise Saturated(why, float(wait_s.min()))
        return None if saturation.wait else room

    def _refresh(self, now: float) -> None:
        for pod in self.index.changed:
            if pod.row >= 0:
                self._table.touch(pod.row)
        self.index.changed.clear()
        self._table.refresh(now)

    def _match(self, request: Request, now: float) -> dict[str, Match]:
        """Return the matches by scope: one, unless a request could go to several models."""
        if not request.key:
            return {}
        matches: dict[str, Match] = {}
        for scope, holders in self._table.scopes(request).items():
            # An adapter's files may differ between endpoints: each holds what was computed with its own.
            for adapter, rows in holders.items():
                match = self._match_in(scope, with_adapter(request.namespace, adapter), request.key, now)
                if len(holders) > 1:
                    match = match.of(pod for row in rows for pod in self._table.at_row(row).pods)
                matches[scope] = match if scope not in matches else matches[scope].joined(match)
        return matches

    def _match_in(self, scope: str, namespace: str | None, key: bytes, now: float) -> Match:
        match = self.index.match(scope, namespace, key, now)
        return match if self.elsewhere is None else self.elsewhere.foreseen(match, scope, namespace, key, now)

    def _candidate(self, endpoint: Endpoint, matches: dict[str, Match], work: Work, rate: float) -> Candidate:
        rank, hit = endpoint.best_hit(matches.get(endpoint.pod.scope))
        cached, host, disk = work.held(hit)
        return Candidate(
            spec=endpoint.spec,
            load=endpoint.load,
            rate=rate,
            hit=hit,
            cached_tokens=cached,
            uncached_tokens=work.prompt_tokens - cached,
            host_tokens=host,
            disk_tokens=disk,
            output_tokens=work.output_tokens,
            held_tokens=endpoint.held_tokens,
            rank=rank,
            fork=work.fork,
        )
