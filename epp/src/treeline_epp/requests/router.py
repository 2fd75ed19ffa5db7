"""The life of one request in the picker: parsed, decided, reserved, and completed when its response begins."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial

import msgspec
from treeline_wire import headers as names
from treeline_wire.paths import is_inference

from treeline_epp.endpoints.adapters.registry import ANYTHING, adapter_of
from treeline_epp.endpoints.prefill_calls import PrefillCalls
from treeline_epp.flow.control import FlowControl
from treeline_epp.flow.quotas import Quotas
from treeline_epp.flow.ticket import Ticket
from treeline_epp.metrics import Metrics
from treeline_epp.picking.decision import Decision, Lease, NoEndpoints, Outcome, PickError
from treeline_epp.picking.explanation import Explanation
from treeline_epp.picking.picker import Picker
from treeline_epp.picking.request import Request
from treeline_epp.picking.score import ASSUMED_OUTPUT_TOKENS
from treeline_epp.requests import refusals
from treeline_epp.requests.body import Buffer, Immediate, RouteRequest
from treeline_epp.requests.decision_log import DecisionLog
from treeline_epp.requests.exchange import DEFAULT_FLOW, NO_OBSERVERS, Exchange, Observers
from treeline_epp.requests.gateway_rules import NO_RULES, GatewayRules
from treeline_epp.requests.isolation import NO_ISOLATION, Isolation
from treeline_epp.requests.model_registry import ModelRegistry
from treeline_epp.requests.outline import Outline
from treeline_epp.requests.parse import parse
from treeline_epp.requests.prefilling import Prefilling
from treeline_epp.requests.refusals import Refusal
from treeline_epp.requests.subset import parse_subset
from treeline_epp.requests.usage import Usage, is_stream
from treeline_epp.signals import Demand

log = logging.getLogger(__name__)

_LONGEST_NAME = 256
_MOST_TOKENS = 10**9

Routed = Lease | Refusal | Immediate


@dataclass(eq=False)
class Router:
    """Passes requests to the picker, and reports their results. `on_trouble(name)` is called when an endpoint seems to
    have failed one, `on_unknown_model()` when one names a model that no pool serves; `draw()` in [0, 1) chooses among
    weighted targets. `clients_select`: a header of conformance tests names the endpoints that a request may go to, even
    against the proxy. `decisions` logs them, if a page shows them. `flow` lets requests wait; `quotas` are those of
    clients. `prefilling` asks other endpoints for prompts; none, until it is replaced.

    A proxy may ask more than once for one request: Envoy AI Gateway 1.0 puts a filter of ours into the chain for each
    match of a pool's routes. A repeated request that carries its destination gets the same one, and counts once.
    """

    picker: Picker
    registry: ModelRegistry
    metrics: Metrics
    _: KW_ONLY
    on_trouble: Callable[[str], None] = lambda _name: None
    on_unknown_model: Callable[[], None] = lambda: None
    isolation: Isolation = NO_ISOLATION
    rules: GatewayRules = NO_RULES
    clients_select: bool = False
    demand: Demand = field(default_factory=Demand)
    decisions: DecisionLog | None = None
    observers: Observers = NO_OBSERVERS
    flow: FlowControl[Routed] | None = None
    quotas: Quotas | None = None
    prefilling: Prefilling = field(init=False)
    clock: Callable[[], float] = time.monotonic
    draw: Callable[[], float] = random.random
    _leases: dict[str, Lease] = field(default_factory=dict)
    """Requests whose response has not begun, by their id."""
    _exchanges: dict[Lease | Ticket[Routed], Exchange] = field(default_factory=dict)
    """The records of open requests, if observers, quotas or the queue need them."""

    def __post_init__(self) -> None:
        self.prefilling = Prefilling(self.picker.parts, PrefillCalls(lambda _server: None), self.clock)

    def route(self, asked: RouteRequest, outline: Outline | None = None) -> Routed | Ticket[Routed]:
        """Route a request: return its lease, or the answer that the client gets instead; a ticket if it must wait,
        which the caller passes to `resume` when it is done. In the end the caller passes a lease or a ticket to
        `release`. Never raises.

        `outline` as in `parse`.
        """
        known = self._leases.get(asked.id)
        if known is not None and asked.headers.get(names.DESTINATION) == known.destination:
            return replace(known, closed=True)
        started = time.perf_counter()
        kept = self.observers or self.flow is not None or self.quotas is not None
        client = self.isolation.client(asked.headers)
        exchange = self._exchange(asked, client) if kept else None
        result: Routed | Ticket[Routed]
        try:
            result = self._route(asked, outline, client, exchange)
        except Exception as error:
            result = self._failed(asked.id, error)
        self.metrics.pick_seconds.observe(time.perf_counter() - started)
        if isinstance(result, Ticket):
            assert exchange is not None, "flow control keeps one"
            self._exchanges[result] = exchange
            return result
        result = self._decided(exchange, result)
        if asked.observed and isinstance(result, Lease):
            self.release(result)  # the proxy routes it by itself: nothing is reserved or predicted for our choice
        return result

    def resume(self, ticket: Ticket[Routed]) -> Routed:
        """Return the result of `route` for a ticket that is done."""
        exchange = self._exchanges.pop(ticket)
        exchange.turn = ticket.served
        try:
            result = ticket.result()
            assert result is not None, "who abandons a ticket does not ask for it"
        except Exception as error:
            result = self._failed(ticket.asked.request_id, error)
        return self._decided(exchange, result)

    def response(
        self,
        lease: Lease,
        headers: Mapping[str, str] | None,
        served: str | None = None,
        data: Buffer = b"",
        *,
        ended: bool = False,
    ) -> tuple[tuple[str, bytes], ...]:
        """Take what the proxy shows of the response: its `headers` (lower-case names) when it begins, with the address
        that answered if it says so; a piece of the body; its end. Returns response headers that tell the client what is
        left of its quota.
        """
        exchange = self._exchanges.get(lease)
        if headers is not None:
            self._begun(lease, exchange, headers, served)
        if exchange is None:
            return ()
        if data or ended:
            exchange.shown(data, self.clock(), ended=ended)
        return () if headers is None or exchange.spend is None else exchange.spend.account.headers(self.clock())

    def release(self, held: Lease | Ticket[Routed], *, unsent: bool = False) -> None:
        """Take the end of the stream. Without a response before it, the client went away, or the proxy gave up; or the
        request was not sent to the endpoint at all (`unsent`), and costs nothing. May be called again.
        """
        if isinstance(held, Ticket):
            if held not in self._exchanges:
                return
            if held.done:
                exchange, result = self._exchanges[held], self.resume(held)
                if isinstance(result, Lease):
                    self._give_back(exchange)
                    self.release(result)
                return
            assert self.flow is not None
            self.flow.cancel(held)
            self._decided(self._exchanges.pop(held), refusals.client_gone())
            return
        self._forget(held)
        if not held.closed:
            self.prefilling.drop(held)
        if self.picker.close(held, self.clock(), Outcome.CANCELLED):
            self.metrics.ended(Outcome.CANCELLED)
        if held in self._exchanges:
            exchange = self._exchanges.pop(held)
            if unsent:
                self._give_back(exchange)
            elif exchange.body is not None and (exchange.spend is not None or exchange.turn is not None):
                self._used(exchange, exchange.body.estimate())
            self.observers.ended(exchange)

    def explain(self, asked: RouteRequest, outline: Outline | None = None) -> Explanation:
        """Return the decision of `route` for a request, without its effects."""
        parsed = self._parsed(asked, outline, self.picker.has_ready)
        if isinstance(parsed, Refusal):
            return Explanation("", parsed.message)
        if isinstance(parsed, Immediate):
            return Explanation("", "the picker answers this itself")
        return self.picker.explain(parsed, self.clock())

    # The decision

    def _exchange(self, asked: RouteRequest, client: str | None) -> Exchange:
        flow = self.rules.fairness_id(asked.headers) or DEFAULT_FLOW
        size = 0 if asked.body is None else len(asked.body)
        exchange = Exchange(
            asked.id, asked.path, client, flow, size, asked.shows_response, asked.observed, self.clock()
        )
        self.observers.asked(exchange, asked.headers)
        return exchange

    def _route(
        self, asked: RouteRequest, outline: Outline | None, client: str | None, exchange: Exchange | None
    ) -> Routed | Ticket[Routed]:
        self.metrics.asked(client)
        request = self._parsed(asked, outline, partial(self._ready, asked))
        if not isinstance(request, Request):
            return request
        if exchange is None:
            return self._decide(asked, request)
        exchange.request, exchange.version = request, self.registry.version
        flow = client or exchange.flow[:_LONGEST_NAME]
        if self.quotas is not None:
            exchange.spend = self.quotas.spend(flow, _allowed(request), self.clock())
        if self.flow is None or asked.observed:  # a request that is only shown was sent on long ago
            return self._decide(asked, request)
        turn = partial(self._turn, asked, outline, exchange)
        return self.flow.admit(request, flow, len(asked.body or b""), turn)

    def _turn(self, asked: RouteRequest, outline: Outline | None, exchange: Exchange) -> Routed:
        """Decide a request under flow control, at once or at its turn. If models, keyers or isolation have changed
        meanwhile (they are unknown without an endpoint), it is parsed again. Raises PickError.
        """
        request, version = exchange.request, self.registry.version
        if request is None or version != exchange.version:
            read = self._parsed(asked, outline, partial(self._ready, asked))
            if not isinstance(read, Request):
                return read
            request = exchange.request = read
            exchange.version = version
        try:
            return self._decide(asked, request)
        except NoEndpoints:  # another pool may stand in when its turn comes
            exchange.version = -1
            raise

    def _parsed(
        self, asked: RouteRequest, outline: Outline | None, ready: Callable[[str, str], bool]
    ) -> Request | Refusal | Immediate:
        if self.clients_select and (selection := asked.headers.get(names.SELECTION)):
            asked = msgspec.structs.replace(asked, subset=parse_subset(selection))
        return parse(
            asked,
            self.registry,
            outline=outline,
            draw=self.draw(),
            ready=ready,
            isolation=self.isolation,
            rules=self.rules,
        )

    def _decide(self, asked: RouteRequest, request: Request) -> Routed:
        """Pick and reserve an endpoint. Raises PickError."""
        now, metrics = self.clock(), self.metrics
        explained = None if self.decisions is None else self.decisions.explained(self.picker, request, now)
        decision = self._picked(request, now)
        if not _may_be_asked(asked, decision.endpoint.engine):
            return refusals.path_not_served()
        lease = self.picker.reserve(decision, now)
        lease.added = tuple((name, None) for name in names.ENGINES if name in asked.headers)
        if (rank := decision.endpoint.rank_for(asked.path)) is not None or names.RANK in asked.headers:
            lease.added += ((names.RANK, None if rank is None else str(rank)),)
        metrics.decided(decision.endpoint.name)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("decision", extra={"fields": decision.explain()})
        if self.decisions is not None:
            self.decisions.add(decision, explained)
        if request.key_tokens_estimate is not None:
            metrics.bounded_prompts.inc()
        if asked.body and request.members is not None:
            metrics.salted.inc()
        if asked.body and request.rewrite is not None:
            metrics.rewritten.inc()
        if request.sent is not None:
            for part in filter(None, (lease.answer, lease.prefill)):
                request.sent(part.endpoint.spec.name, now)
        if request.request_id:
            self._leases[request.request_id] = lease
        return lease

    def _picked(self, request: Request, now: float) -> Decision:
        """Return the decision, and count the request as demand for its pool. Raises PickError."""
        try:
            decision = self.picker.pick(request, now)
        except NoEndpoints:
            # If one is ready, the proxy's subset excludes it.
            if request.pool is not None and not self.picker.has_ready(request.pool, request.model):
                self.demand.missed(request.request_id, request.pool, request.model, request.prompt_tokens_estimate, now)
            raise
        prompt_s = decision.apart.prompt_s if decision.apart is not None else 0.0
        self.demand.picked(request.model, decision.endpoint.pool, decision.ttft_s, now, prompt_s)
        return decision

    def _ready(self, asked: RouteRequest, pool: str, model: str) -> bool:
        """Return whether a pool could serve this request now. If not, it counts as missed, even if another pool serves
        it.
        """
        ready = self.picker.has_ready(pool, model)
        if not ready:
            self.demand.missed(asked.id, pool, model, 0, self.clock())
        return ready

    def _failed(self, id: str, error: Exception) -> Refusal:
        if isinstance(error, PickError):
            return refusals.of_pick(error)
        log.error("request %s: the picker failed", id, exc_info=error)
        self.metrics.internal_errors.inc()
        return refusals.internal_error()

    def _decided(self, exchange: Exchange | None, result: Routed) -> Routed:
        """Report the result to metrics and observers, and keep the record if it is needed later."""
        if isinstance(result, Refusal):
            self.metrics.refusals.labels(result.code).inc()
            if result.code == "model_not_found":
                self.on_unknown_model()
        if exchange is None:
            return result
        exchange.decided_at = self.clock()
        if isinstance(result, Lease):
            exchange.decision = result.decision
        else:
            self._give_back(exchange)
            if isinstance(result, Refusal):
                exchange.refusal, exchange.status = result, result.status
        self.observers.decided(exchange)
        if isinstance(result, Refusal):
            self.observers.ended(exchange)
        elif isinstance(result, Lease):
            result.added += tuple(exchange.added)
            if self.observers or exchange.spend is not None or exchange.turn is not None:
                self._exchanges[result] = exchange
        return result

    # The response

    def _begun(self, lease: Lease, exchange: Exchange | None, headers: Mapping[str, str], served: str | None) -> None:
        now, decision, metrics = self.clock(), lease.decision, self.metrics
        self._forget(lease)
        outcome = _outcome(headers)
        cached, prompt = _count(headers, names.CACHED_TOKENS), _count(headers, names.PROMPT_TOKENS)
        if exchange is not None:
            exchange.answered(headers, served, Usage(prompt, cached), now)
        if outcome is not Outcome.HEADERS:
            cached = prompt = None  # a prompt that was not computed teaches nothing
            self.prefilling.drop(lease)
        # Headers of a stream come with its first token; those of a whole answer with its last.
        streams = is_stream(headers)
        ttft = now - lease.opened_at if streams and prompt is not None else None
        if not self.picker.close(
            lease, now, outcome, served=served, ttft_s=ttft, cached_tokens=cached, prompt_tokens=prompt
        ):
            return
        metrics.ended(outcome)
        if exchange is not None:
            failed = headers.get(":status", "")[:1] in ("4", "5")
            self._used(exchange, Usage(0, 0, 0) if failed else Usage(prompt, cached, None))
        if ttft is not None:
            metrics.ttft_seconds.observe(ttft)
        by_other = served is not None and served != decision.endpoint.address
        if by_other:
            listed = any(served == spec.address for spec in decision.fallbacks)
            metrics.served_by_other.labels("fallback" if listed else "other").inc()
        elif outcome is Outcome.HEADERS:
            best = decision.best.candidate
            metrics.routed_prompt_tokens.inc(best.cached_tokens + best.uncached_tokens)
            metrics.routed_held_tokens.inc(best.hit.tokens + best.host_tokens + best.disk_tokens)
            for tier, tokens in (("host", best.host_tokens), ("disk", best.disk_tokens)):
                if tokens:
                    metrics.routed_loaded_tokens.labels(tier).inc(tokens)
        request = decision.request
        if not by_other and cached is not None and prompt is not None:
            metrics.predicted_hit_tokens.inc(decision.best.candidate.cached_tokens)
            metrics.reported_hit_tokens.inc(cached)
            metrics.reported_prompt_tokens.inc(prompt)
            metrics.computed(request.client, prompt)
            if ttft is not None:
                metrics.form_predicted_seconds.labels(decision.form).inc(decision.ttft_s)
                metrics.form_seconds.labels(decision.form).inc(ttft)
        if request.learn is not None:
            hit = decision.best.candidate.hit
            if prompt is not None and request.key is not None and request.key_tokens_estimate is None:
                request.learn(len(request.key), prompt)
            elif outcome is Outcome.HEADERS and hit.tokens:
                # Engines without such headers report their hits by events.
                request.learn(hit.end, hit.tokens)
        if by_other or outcome is Outcome.ERROR:
            self.on_trouble(decision.endpoint.server)

    def _used(self, exchange: Exchange, usage: Usage) -> None:
        """Correct the costs of a request for its flow and its client, by the usage known so far."""
        usage = exchange.took = usage.counted().over(exchange.took)
        decision = exchange.decision
        assert decision is not None
        best, request = decision.best.candidate, decision.request
        if exchange.turn is not None:
            prompt = best.cached_tokens + best.uncached_tokens if usage.prompt is None else usage.prompt
            cached = best.cached_tokens if usage.cached is None else usage.cached
            output = best.output_tokens if usage.output is None else usage.output
            exchange.turn(max(0, prompt - cached) + output)
        if exchange.spend is not None:
            prompt = request.prompt_tokens_estimate if usage.prompt is None else usage.prompt
            output = _allowed(request) - request.prompt_tokens_estimate if usage.output is None else usage.output
            exchange.spend.took(prompt + output, self.clock())

    def _give_back(self, exchange: Exchange) -> None:
        """Give back the costs of a request that reached no endpoint."""
        if exchange.spend is not None:
            exchange.spend.give_back(self.clock())
            exchange.spend = None
        if exchange.turn is not None:
            exchange.turn(0.0)

    def _forget(self, lease: Lease) -> None:
        id = lease.decision.request.request_id
        if self._leases.get(id) is lease:
            del self._leases[id]


def cost(result: Routed) -> float:
    """Return the tokens of prompt and output that a decision is expected to take."""
    if not isinstance(result, Lease):
        return 0.0
    best = result.decision.best.candidate
    return best.uncached_tokens + best.output_tokens


def _allowed(request: Request) -> int:
    """Return the tokens that a request counts before its real usage is known: its prompt, and all the output it
    allows.
    """
    if not request.prompt_tokens_estimate:
        return 0
    most = ASSUMED_OUTPUT_TOKENS if request.max_output_tokens is None else request.max_output_tokens
    return request.prompt_tokens_estimate + min(most * request.outputs, _MOST_TOKENS)


def _may_be_asked(asked: RouteRequest, engine: str) -> bool:
    """Return whether this method and path is inference for an engine of this type; any path is if discovery does not
    name the type, or the proxy shows no headers. If pools with different engines share a gateway, its edge can only
    check the union of their paths.
    """
    if not engine or not asked.headers:
        return True
    paths = (adapter_of(engine) or ANYTHING).paths
    return is_inference(paths, asked.headers.get(":method", ""), asked.path)


def _outcome(headers: Mapping[str, str]) -> Outcome:
    if names.OVERLOADED in headers:
        return Outcome.OVERLOADED
    by_status = {"3": Outcome.REFUSED, "4": Outcome.REFUSED, "5": Outcome.ERROR}
    return by_status.get(headers.get(":status", "")[:1], Outcome.HEADERS)


def _count(headers: Mapping[str, str], name: str) -> int | None:
    text = headers.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 10 else None
