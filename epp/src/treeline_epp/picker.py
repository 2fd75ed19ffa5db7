"""The picker: endpoints and their load, one decision per request, one lease per decision.

Sans-IO: `now` (seconds of any monotonic clock, the same for all calls) is passed in; drivers feed load reports,
readiness and publishers' events, and call `on_tick`.
"""

import random
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from treeline_wire.keys import PrefixKeys
from treeline_wire.load import LoadStat, TreelineLoad

from treeline_epp.audit import Audit, Verdict
from treeline_epp.breaker import Breaker
from treeline_epp.endpoint import (
    Decision,
    EndpointSpec,
    NoEndpoints,
    Outcome,
    PickRequest,
    Saturated,
    split_address,
)
from treeline_epp.index import NO_HIT, Index, Match, Pod
from treeline_epp.load import EndpointLoad, prefill_rate
from treeline_epp.policy import ASSUMED_OUTPUT_TOKENS, Candidate, Scored, create_policy, score
from treeline_epp.publisher import Action, Publisher
from treeline_epp.reservations import Reservation

__all__ = ["Endpoint", "Lease", "NoEndpoints", "Picker", "PickerConfig", "Saturated"]


#: An engine may announce this much more than its memory holds: blocks just stored whose victims are not yet announced.
CAPACITY_SLACK = 1.1


@dataclass(frozen=True, slots=True)
class PickerConfig:
    """`max_ttft_s`: an endpoint is saturated when a request would wait longer than this for its turn; its own prefill,
    however long, is no queue. `fallbacks`: destinations after the first. `seed` makes ties reproducible."""

    policy: str = "treeline"
    max_ttft_s: float = 30.0
    fallbacks: int = 1
    seed: int = 0


@dataclass(eq=False, slots=True)
class Endpoint:
    """What the picker knows of one endpoint."""

    spec: EndpointSpec
    pod: Pod
    host: str
    load: EndpointLoad = field(default_factory=EndpointLoad)
    audit: Audit = field(default_factory=Audit)
    breaker: Breaker = field(default_factory=Breaker)
    ready: bool = True
    draining: bool = False
    publisher: Publisher | None = None

    @property
    def eligible(self) -> bool:
        """May new requests go there?"""
        report = self.load.report
        return self.ready and not self.draining and not (report is not None and report.draining)

    def serves(self, request: PickRequest) -> bool:
        """Is it in the request's pool, and does it serve its model?"""
        spec = self.spec
        if request.pool is not None and spec.pool != request.pool:
            return False
        return not spec.models or request.model is None or request.model in spec.models


class Lease:
    """One decision while it is carried out. Close it in a `finally`; only the first close counts."""

    __slots__ = (
        "_picker",
        "_predicted_until",
        "_queued_tokens",
        "_reservation",
        "closed",
        "decision",
        "endpoint",
        "opened_at",
    )

    def __init__(self, picker: "Picker", endpoint: Endpoint, decision: Decision, now: float) -> None:
        self._picker = picker
        self._queued_tokens = endpoint.load.queue(now)[0]
        self._reservation: Reservation = endpoint.load.reservations.open(
            decision.uncached_tokens, now, decision.predicted_ttft_s
        )
        request = decision.request
        self._predicted_until: float | None = None
        if request.key:
            self._predicted_until = picker.index.predict(
                endpoint.pod, request.namespace, request.key, decision.hit, now
            )
        endpoint.breaker.on_pick(now)
        self.endpoint = endpoint
        self.decision = decision
        self.opened_at = now
        self.closed = False

    def close(
        self,
        now: float,
        outcome: Outcome,
        *,
        served: str | None = None,
        ttft_s: float | None = None,
        cached_tokens: int | None = None,
        prompt_tokens: int | None = None,
    ) -> bool:
        """End the lease; True the first time, False (and no effect) ever after.

        `served`: the address that answered, if it is known; feedback counts only where it is the picked endpoint.
        `ttft_s`: seconds from pick to response headers, only if they came with the first token (our streaming
        responses). `cached_tokens` and `prompt_tokens` as the runtime reported them.
        """
        if self.closed:
            return False
        self.closed = True
        load = self.endpoint.load
        load.reservations.close(self._reservation)
        elsewhere = served if served != self.endpoint.spec.address else None
        if elsewhere or outcome is not Outcome.HEADERS:
            self._withdraw()
        if elsewhere:
            if outcome is Outcome.HEADERS:
                self._picker.served_elsewhere(self, elsewhere, now)
            return True
        if outcome is Outcome.ERROR:
            self.endpoint.breaker.on_error(now)
        elif outcome is Outcome.HEADERS:
            self.endpoint.breaker.on_answer()
        if outcome is Outcome.OVERLOADED:
            load.on_overloaded(now)
        elif outcome is Outcome.HEADERS and cached_tokens is not None and prompt_tokens is not None:
            load.train_hits(cached_tokens, prompt_tokens)
            if ttft_s is not None:
                load.train(max(0, prompt_tokens - cached_tokens), self._queued_tokens, ttft_s)
            self._picker.audit(self, cached_tokens, now)
        return True

    def _withdraw(self) -> None:
        """The endpoint did not do this prefill: it will not hold the prompt."""
        request = self.decision.request
        if self._predicted_until is not None and request.key and self.endpoint.pod.bit:
            self._picker.index.withdraw(
                self.endpoint.pod, request.namespace, request.key, self._predicted_until
            )


class Picker:
    """Endpoints in, decisions out.

    Complexity: `pick` is O(prompt bytes) for the match, O(endpoints log endpoints) for the ranking.
    """

    def __init__(self, config: PickerConfig | None = None, index: Index | None = None) -> None:
        self.config = config or PickerConfig()
        self.index = index or Index()
        self.endpoints: dict[str, Endpoint] = {}
        self._policy = create_policy(self.config.policy, random.Random(self.config.seed))

    # Endpoints

    def add_endpoint(self, spec: EndpointSpec, *, ready: bool = True) -> Endpoint:
        """Add an endpoint, or replace the one of that name: with a new uid or address it starts from nothing."""
        known = self.endpoints.get(spec.name)
        if known is not None:
            if (known.spec.uid, known.spec.address) == (spec.uid, spec.address):
                known.spec = spec
                return known
            self.remove_endpoint(spec.name)
        scope = spec.models[0] if spec.models else spec.pool
        host, _ = split_address(spec.address)
        endpoint = Endpoint(spec, self.index.add_pod(spec.name, scope), host, ready=ready)
        self.endpoints[spec.name] = endpoint
        return endpoint

    def remove_endpoint(self, name: str) -> None:
        """Forget an endpoint and all it holds. Unknown names are ignored."""
        endpoint = self.endpoints.pop(name, None)
        if endpoint is not None:
            self.index.remove_pod(endpoint.pod)

    def set_ready(self, name: str, ready: bool) -> None:
        """Readiness as polled or watched. Unknown names are ignored."""
        if name in self.endpoints:
            self.endpoints[name].ready = ready

    def set_draining(self, name: str, draining: bool) -> None:
        """Draining as discovery tells it; the load report's own flag counts besides. Unknown names are ignored."""
        if name in self.endpoints:
            self.endpoints[name].draining = draining

    def publisher(self, name: str, keys: PrefixKeys | None) -> Publisher:
        """The publisher of an endpoint, made on first use. Raises KeyError for an unknown endpoint."""
        endpoint = self.endpoints[name]
        if endpoint.publisher is None:
            endpoint.publisher = Publisher(self.index, endpoint.pod, keys)
        return endpoint.publisher

    def on_load(self, name: str, load: LoadStat | TreelineLoad, now: float) -> list[Action]:
        """Take a load report. Returns actions for the endpoint's publisher socket. Unknown names are ignored."""
        endpoint = self.endpoints.get(name)
        if endpoint is None:
            return []
        endpoint.load.on_load(load, now)
        self._check_capacity(endpoint, now)
        if endpoint.publisher is not None and isinstance(load, TreelineLoad):
            return endpoint.publisher.on_heartbeat(load.epoch, None, now)
        return []

    def on_tick(self, now: float) -> None:
        """Housekeeping; call about every 100 ms."""
        for endpoint in self.endpoints.values():
            endpoint.load.reservations.expire(now)
        self.index.tick(now)

    # Decisions

    def pick(self, request: PickRequest, now: float) -> Decision:
        """Decide. Changes nothing but the policy's own state; call `reserve` next.

        Raises NoEndpoints (503), or Saturated (429) for a sheddable request: others go to the best of full endpoints.
        """
        eligible = self._eligible(request, now)
        scored = [score(candidate, now) for candidate in self._candidates(request, eligible, now)]
        if request.sheddable:
            self._shed(scored)
        ranked = self._policy.rank(scored)
        best = ranked[0]
        return Decision(
            request=request,
            endpoint=best.candidate.spec,
            fallbacks=self._fallbacks(ranked),
            predicted_ttft_s=best.ttft_s,
            predicted_prefill_s=best.prefill_s,
            cached_tokens=best.candidate.cached_tokens,
            hit=best.candidate.hit,
            uncached_tokens=best.candidate.uncached_tokens,
            policy=self._policy.name,
            ranked=tuple(ranked),
        )

    def _shed(self, scored: Sequence[Scored]) -> None:
        limit, soonest = self.config.max_ttft_s, min(s.wait_s for s in scored)
        if soonest > limit:
            raise Saturated(
                f"every endpoint has more than {limit:g} s of work waiting, and requests for this model are sheddable",
                soonest - limit,
            )

    def has_ready(self, pool: str, model: str) -> bool:
        """Could a request for this model be served by this pool now? O(endpoints)."""
        asked = PickRequest("", model=model, pool=pool)
        return any(e.eligible and e.serves(asked) for e in self.endpoints.values())

    def reserve(self, decision: Decision, now: float) -> Lease:
        """Open the lease of a decision; the endpoint is at once expected to hold the prompt. O(prompt bytes).

        Raises NoEndpoints if the endpoint left since.
        """
        endpoint = self.endpoints.get(decision.endpoint.name)
        if endpoint is None:
            raise NoEndpoints(f"endpoint {decision.endpoint.name} is gone")
        return Lease(self, endpoint, decision, now)

    def _eligible(self, request: PickRequest, now: float) -> list[Endpoint]:
        serving = [e for e in self.endpoints.values() if e.eligible and e.serves(request)]
        if not serving:
            raise NoEndpoints("no endpoint is ready")
        if request.subset is not None:
            serving = self._inside(serving, request.subset)
        # Where all of them seem to fail, requests may be at fault, or we ourselves; and there is nowhere better to go.
        return [e for e in serving if e.breaker.admits(now) and not e.load.silent(now)] or serving

    @staticmethod
    def _inside(serving: Sequence[Endpoint], subset: frozenset[str]) -> list[Endpoint]:
        allowed = {split_address(entry) for entry in subset}
        inside = [e for e in serving if (e.host, "") in allowed or split_address(e.spec.address) in allowed]
        if not inside:
            raise NoEndpoints("no ready endpoint is in the subset that the proxy allows")
        return inside

    def audit(self, lease: Lease, cached_tokens: int, now: float) -> None:
        """An endpoint reported its true hit: compare, and act on what that says of the index."""
        endpoint, decision = lease.endpoint, lease.decision
        request, pod, publisher = decision.request, endpoint.pod, endpoint.publisher
        if request.key is None or publisher is None or not pod.precise or not pod.bit:
            return
        end = decision.hit.end
        prefix = zlib.crc32(request.key[max(0, end - 64) : end] or request.key[:64])
        verdict = endpoint.audit.observe(
            decision.hit.tokens, decision.cached_tokens, cached_tokens, pod.block_size, prefix, now
        )
        if verdict is Verdict.RESYNC:
            publisher.resync()
        elif verdict is Verdict.DOUBT:
            self.index.doubt(pod, request.namespace, request.key, cached_tokens, now)

    def served_elsewhere(self, lease: Lease, address: str, now: float) -> None:
        """Another endpoint than the picked one answered: it is the one that holds the prompt now."""
        request = lease.decision.request
        for endpoint in self.endpoints.values():
            if endpoint.spec.address == address and request.key:
                self.index.predict(endpoint.pod, request.namespace, request.key, NO_HIT, now)
                return

    def _check_capacity(self, endpoint: Endpoint, now: float) -> None:
        """More blocks than its memory has room for: removals were lost."""
        report, pod = endpoint.load.report, endpoint.pod
        if report is None or not report.tokens_total or endpoint.publisher is None:
            return
        if pod.blocks * pod.block_size > CAPACITY_SLACK * report.tokens_total and endpoint.audit.allow(now):
            endpoint.publisher.resync()

    def _candidates(
        self, request: PickRequest, eligible: Sequence[Endpoint], now: float
    ) -> Iterable[Candidate]:
        fastest = max(endpoint.load.own_rate() for endpoint in eligible)
        matches = self._match(request, eligible, now)
        prompt_tokens = max(1, request.prompt_tokens_estimate)
        per_byte = prompt_tokens / len(request.key) if request.key else 0.0
        most = request.max_output_tokens
        output_tokens = ASSUMED_OUTPUT_TOKENS if most is None else min(most, ASSUMED_OUTPUT_TOKENS)
        for endpoint in eligible:
            match = matches.get(endpoint.pod.scope)
            hit = match.hit(endpoint.pod) if match is not None else NO_HIT
            cached = hit.tokens + int((hit.reach - hit.end) * per_byte)
            prompt = max(prompt_tokens, hit.tokens + 1)  # it is an estimate; what is confirmed is not
            cached = min(cached, prompt - 1)
            yield Candidate(
                spec=endpoint.spec,
                load=endpoint.load,
                rate=prefill_rate(endpoint.load.own_rate(), fastest),
                hit=hit,
                cached_tokens=cached,
                uncached_tokens=prompt - cached,
                output_tokens=output_tokens,
                held_tokens=endpoint.pod.blocks * endpoint.pod.block_size,
            )

    def _match(self, request: PickRequest, eligible: Sequence[Endpoint], now: float) -> dict[str, Match]:
        """Matches by scope: one, unless a request could go to several models."""
        if not request.key:
            return {}
        scopes: dict[str, list[Pod]] = {}
        for endpoint in eligible:
            scopes.setdefault(endpoint.pod.scope, []).append(endpoint.pod)
        match = self.index.match
        return {
            scope: match(scope, request.namespace, request.key, pods, now) for scope, pods in scopes.items()
        }

    def _fallbacks(self, ranked: Sequence[Scored]) -> tuple[EndpointSpec, ...]:
        first = ranked[0].candidate.spec.address
        chosen: dict[str, EndpointSpec] = {}
        for s in ranked[1:]:
            spec = s.candidate.spec
            if len(chosen) < self.config.fallbacks and spec.address != first:
                chosen.setdefault(spec.address, spec)
        return tuple(chosen.values())
