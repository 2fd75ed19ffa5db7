"""One request's way through the picker: parsed, decided, reserved, and completed when its response begins."""

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
from treeline_epp.flow.control import FlowControl
from treeline_epp.flow.quotas import Quotas, Spend
from treeline_epp.flow.ticket import Served, Ticket
from treeline_epp.keyers.base import Keyer
from treeline_epp.metrics import Metrics
from treeline_epp.picking.decision import Decision, Lease, NoEndpoints, Outcome, PickError
from treeline_epp.picking.explanation import Explanation
from treeline_epp.picking.picker import Picker
from treeline_epp.picking.request import PickRequest
from treeline_epp.picking.score import ASSUMED_OUTPUT_TOKENS
from treeline_epp.requests import refusals
from treeline_epp.requests.body import Body, Buffer
from treeline_epp.requests.decision_log import DecisionLog
from treeline_epp.requests.exchange import DEFAULT_FLOW, NO_OBSERVERS, Exchange, Observers
from treeline_epp.requests.gateway_rules import NO_RULES, GatewayRules
from treeline_epp.requests.isolation import NO_ISOLATION, Isolation
from treeline_epp.requests.messages import Immediate, RouteRequest
from treeline_epp.requests.model_registry import ModelRegistry
from treeline_epp.requests.outline import Outline
from treeline_epp.requests.parse import Request, parse
from treeline_epp.requests.refusals import Refusal
from treeline_epp.requests.rewrite import edited, rewritten
from treeline_epp.requests.subset import parse_subset
from treeline_epp.requests.usage import NOTHING, Usage, UsageReader
from treeline_epp.signals import Demand

log = logging.getLogger(__name__)

_LONGEST_NAME = 256
_MOST_TOKENS = 10**9


@dataclass(eq=False, slots=True)
class RoutedRequest:
    """A request that goes to an endpoint. `body` is to be sent instead of the client's: the same with another model
    name, or with the client's salt. The rest is for the router, when the response begins (`Router.complete`) or the
    stream has ended (`Router.release`)."""

    lease: Lease
    keyer: Keyer | None
    body: bytes | Body | None
    client: str | None
    exchange: Exchange | None = None
    """For observers; None where there are none."""
    served: Served | None = None
    spend: Spend | None = None
    usage: Usage = NOTHING
    reader: UsageReader | None = None
    """Of the response's body, once that has begun, where somebody wants to know what the request took."""

    @property
    def destination(self) -> str:
        """The destination list, best first, as header and metadata carry it."""
        return ",".join(self.lease.decision.destinations)


Routed = RoutedRequest | Refusal | Immediate


@dataclass(eq=False)
class Router:
    """Takes requests to the picker, and its feedback. `on_trouble(name)` is called when an endpoint seems to have
    failed one, `on_unknown_model()` when one names a model that no pool serves; `draw()` in [0, 1) chooses among
    weighted targets. `clients_select`: a header of conformance tests names the endpoints that a request may go to,
    whatever the proxy allows. `decisions` notes them, where they are looked at. `flow` lets requests wait; `quotas` are
    those of clients.

    A proxy may ask more than once for one request: Envoy AI Gateway 1.0 puts a filter of ours into the chain for each
    match of a pool's routes. Who asks again with the destination that it was just given gets that one again, and the
    request counts once.
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
    clock: Callable[[], float] = time.monotonic
    draw: Callable[[], float] = random.random
    _routed: dict[str, RoutedRequest] = field(default_factory=dict)
    """Requests whose response has not begun, by their id."""

    def route(self, request: RouteRequest, outline: Outline | None = None) -> Routed | Ticket[Routed]:
        """Where the request goes, or the answer that the client gets instead; a ticket where it has to wait, which is
        to be given to `resume` when it is done, or to `abandon`. Never raises.

        `outline` as for `request.parse`.
        """
        known = self._routed.get(request.id)
        if known is not None and request.headers.get(names.DESTINATION) == known.destination:
            return replace(known, body=None, exchange=None)
        started = time.perf_counter()
        exchange = self._exchange(request) if self.observers else None
        result: Routed | Ticket[Routed]
        try:
            result = self._route(request, outline, exchange)
        except Exception as error:
            result = self._failed(request.id, error)
        self.metrics.pick_seconds.observe(time.perf_counter() - started)
        if not isinstance(result, Ticket):
            self._decided(exchange, result)
        return result

    def resume(self, ticket: Ticket[Routed]) -> Routed:
        """As `route`, of a ticket that is done."""
        try:
            result = ticket.result()
            assert result is not None, "who abandons a ticket does not ask for it"
        except Exception as error:
            result = self._failed(ticket.asked.request_id, error)
        if isinstance(result, RoutedRequest):
            result.served = ticket.served
        else:
            self._give_back(ticket)
        self._decided(_exchange_of(ticket), result)
        return result

    def abandon(self, ticket: Ticket[Routed]) -> None:
        """The client that waited for it has left."""
        assert self.flow is not None
        if not ticket.done:
            self.flow.cancel(ticket)
            self._give_back(ticket)
            self._decided(_exchange_of(ticket), refusals.client_gone())
        elif isinstance(result := self.resume(ticket), RoutedRequest):
            self.release(result)
            self._give_back(ticket)
            if ticket.served is not None:
                ticket.served.took(0.0)

    def _give_back(self, ticket: Ticket[Routed]) -> None:
        if isinstance(ticket.decide, _Turn):
            ticket.decide.give_back()

    def _failed(self, id: str, error: Exception) -> Refusal:
        if isinstance(error, PickError):
            return refusals.of_pick(error)
        log.error("request %s: the picker failed", id, exc_info=error)
        self.metrics.internal_errors.inc()
        return refusals.internal_error()

    def explain(self, request: RouteRequest, outline: Outline | None = None) -> Explanation:
        """What `route` would decide of a request, without its consequences."""
        parsed = self._parsed(request, outline, self.picker.has_ready)
        if isinstance(parsed, Refusal):
            return Explanation("", parsed.message)
        if isinstance(parsed, Immediate):
            return Explanation("", "the picker answers this itself")
        return self.picker.explain(parsed, self.clock())

    def _exchange(self, request: RouteRequest) -> Exchange:
        client = self.isolation.client(request.headers)
        flow = self.rules.fairness_id(request.headers) or DEFAULT_FLOW
        size = 0 if request.body is None else len(request.body)
        exchange = Exchange(request.id, request.path, client, flow, size, self.clock())
        exchange.shows_body = request.shows_response
        self.observers.asked(exchange, request.headers)
        return exchange

    def _decided(self, exchange: Exchange | None, result: Routed) -> None:
        """Report the result to metrics and observers."""
        if isinstance(result, Refusal):
            self.metrics.refusals.labels(result.code).inc()
            if result.code == "model_not_found":
                self.on_unknown_model()
        if exchange is None:
            return
        exchange.decided_at = self.clock()
        if isinstance(result, RoutedRequest):
            result.exchange, exchange.decision = exchange, result.lease.decision
        elif isinstance(result, Refusal):
            exchange.refusal, exchange.status = result, result.status
        self.observers.decided(exchange)
        if isinstance(result, Refusal):
            self.observers.ended(exchange)

    def complete(
        self, routed: RoutedRequest, headers: Mapping[str, str], served: str | None
    ) -> tuple[tuple[str, bytes], ...]:
        """The response begins: its headers (lower-case names) and, if the proxy tells, who served it. Returns response
        headers that tell its client what is left of its quota."""
        streams = headers.get("content-type", "").startswith("text/event-stream")
        self._completed(routed, headers, served, streams=streams)
        if routed.served is not None or routed.spend is not None:
            routed.reader = UsageReader(stream=streams) if routed.exchange is None else routed.exchange.body
        return () if routed.spend is None else routed.spend.account.told(self.clock())

    def shown(self, routed: RoutedRequest, data: Buffer, *, ended: bool) -> None:
        """A piece of the response's body, and whether the response has ended."""
        if (exchange := routed.exchange) is not None:
            now = self.clock()
            exchange.chunk(data, now)
            if ended:
                exchange.finish(now)
        elif routed.reader is not None:
            routed.reader.feed(data)

    def _completed(
        self, routed: RoutedRequest, headers: Mapping[str, str], served: str | None, *, streams: bool
    ) -> None:
        now, lease = self.clock(), routed.lease
        self._forget(lease)
        decision, metrics = lease.decision, self.metrics
        outcome = _outcome(headers)
        cached, prompt = _count(headers, names.CACHED_TOKENS), _count(headers, names.PROMPT_TOKENS)
        if routed.exchange is not None:
            routed.exchange.reported_prompt, routed.exchange.reported_cached = prompt, cached
            routed.exchange.answered(headers, served, now)
        if outcome is not Outcome.HEADERS:
            cached = prompt = None  # what was not computed teaches nothing
        # Headers of a stream come with its first token; those of a whole answer with its last.
        ttft = now - lease.opened_at if streams and prompt is not None else None
        if not self.picker.close(
            lease, now, outcome, served=served, ttft_s=ttft, cached_tokens=cached, prompt_tokens=prompt
        ):
            return
        metrics.ended(outcome)
        if routed.served is not None or routed.spend is not None:
            failed = headers.get(":status", "")[:1] in ("4", "5")
            self._used(routed, Usage(0, 0, 0) if failed else Usage(prompt, cached, None))
        if ttft is not None:
            metrics.ttft_seconds.observe(ttft)
        by_other = served is not None and served != decision.endpoint.address
        if by_other:
            listed = any(served == spec.address for spec in decision.fallbacks)
            metrics.served_by_other.labels("fallback" if listed else "other").inc()
        elif outcome is Outcome.HEADERS:
            best = decision.best.candidate
            metrics.routed_prompt_tokens.inc(best.cached_tokens + best.uncached_tokens)
            metrics.routed_held_tokens.inc(best.hit.tokens)
        if not by_other and cached is not None and prompt is not None:
            metrics.predicted_hit_tokens.inc(decision.best.candidate.cached_tokens)
            metrics.reported_hit_tokens.inc(cached)
            metrics.reported_prompt_tokens.inc(prompt)
            metrics.computed(routed.client, prompt)
        asked = decision.request
        whole = asked.key is not None and asked.key_tokens_estimate is None
        hit = decision.best.candidate.hit
        if prompt is not None and routed.keyer is not None and whole:
            routed.keyer.learn(len(asked.key or b""), prompt)
        elif (
            outcome is Outcome.HEADERS and routed.keyer is not None and hit.tokens
        ):  # engines that tell nothing in headers tell by their events
            routed.keyer.learn(hit.end, hit.tokens)
        if by_other or outcome is Outcome.ERROR:
            self.on_trouble(decision.endpoint.name)

    def release(self, routed: RoutedRequest) -> None:
        """The stream has ended. Without a response before it the client went away, or the proxy gave up."""
        if routed.reader is not None and (usage := routed.reader.estimate()) != NOTHING:
            self._used(routed, usage)
        routed.reader = None
        self._forget(routed.lease)
        if self.picker.close(routed.lease, self.clock(), Outcome.CANCELLED):
            self.metrics.ended(Outcome.CANCELLED)
        if routed.exchange is not None:
            self.observers.ended(routed.exchange)
            routed.exchange = None

    def _used(self, routed: RoutedRequest, usage: Usage) -> None:
        """What a request took, as far as it is known: what was counted for its flow and its client is put right."""
        usage = routed.usage = usage.counted().over(routed.usage)
        expected = routed.lease.decision
        best, asked = expected.best.candidate, expected.request
        if routed.served is not None:
            prompt = best.cached_tokens + best.uncached_tokens if usage.prompt is None else usage.prompt
            cached = best.cached_tokens if usage.cached is None else usage.cached
            output = best.output_tokens if usage.output is None else usage.output
            routed.served.took(max(0, prompt - cached) + output)
        if routed.spend is not None:
            prompt = asked.prompt_tokens_estimate if usage.prompt is None else usage.prompt
            output = _allowed(asked) - asked.prompt_tokens_estimate if usage.output is None else usage.output
            routed.spend.took(prompt + output, self.clock())

    def _forget(self, lease: Lease) -> None:
        id = lease.decision.request.request_id
        if (known := self._routed.get(id)) is not None and known.lease is lease:
            del self._routed[id]

    def _route(
        self, request: RouteRequest, outline: Outline | None, exchange: Exchange | None
    ) -> Routed | Ticket[Routed]:
        client = self.isolation.client(request.headers)
        self.metrics.asked(client)
        parsed = self._parsed(request, outline, partial(self._ready, request))
        if not isinstance(parsed, Request):
            return parsed
        _note(exchange, parsed)
        if self.flow is None and self.quotas is None:
            return self._decide(request, outline, parsed, client)
        flow = client or self.rules.fairness_id(request.headers)[:_LONGEST_NAME] or DEFAULT_FLOW
        turn = _Turn(self, request, outline, client, parsed, exchange)
        if self.quotas is not None:
            turn.spend = self.quotas.spend(flow, _allowed(parsed), self.clock())
        result: Routed | Ticket[Routed] | None = None
        try:
            if self.flow is None:
                result = turn()
            else:
                at_once = "if-available" in request.headers.get("prefer", "").lower()
                size = len(request.body or b"")
                result = self.flow.admit(parsed, flow, size, turn, may_wait=not at_once)
        finally:
            if not isinstance(result, RoutedRequest | Ticket):
                turn.give_back()
        return result

    def _decide(self, request: RouteRequest, outline: Outline | None, parsed: Request, client: str | None) -> Routed:
        """Raises PickError."""
        now = self.clock()
        explained = None if self.decisions is None else self.decisions.explained(self.picker, parsed, now)
        decision = self._picked(parsed, now)
        if not _may_be_asked(request, decision.endpoint.engine):
            return refusals.path_not_served()
        lease = self.picker.reserve(decision, now)
        self.metrics.decided(decision.endpoint.name)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("decision", extra={"fields": decision.explain()})
        if self.decisions is not None:
            self.decisions.add(decision, explained)
        if parsed.key_tokens_estimate is not None:
            self.metrics.bounded_prompts.inc()
        routed = RoutedRequest(lease, parsed.keyer, self._rewritten(request.body, outline, parsed), client)
        if parsed.request_id:
            self._routed[parsed.request_id] = routed
        return routed

    def _parsed(
        self, request: RouteRequest, outline: Outline | None, ready: Callable[[str, str], bool]
    ) -> Request | Refusal | Immediate:
        if self.clients_select and (selection := request.headers.get(names.SELECTION)):
            request = msgspec.structs.replace(request, subset=parse_subset(selection))
        return parse(
            request,
            self.registry,
            outline=outline,
            draw=self.draw(),
            ready=ready,
            isolation=self.isolation,
            rules=self.rules,
        )

    def _picked(self, request: PickRequest, now: float) -> Decision:
        """The decision; raises PickError. Either way it is demand for its pool."""
        try:
            decision = self.picker.pick(request, now)
        except NoEndpoints:
            # Where one is ready, it is the proxy that allows none of those.
            if request.pool is not None and not self.picker.has_ready(request.pool, request.model):
                self.demand.missed(request.request_id, request.pool, request.model, request.prompt_tokens_estimate, now)
            raise
        self.demand.picked(request.model, decision.endpoint.pool, decision.best.ttft_s, now)
        return decision

    def _ready(self, request: RouteRequest, pool: str, model: str) -> bool:
        """Could a pool serve this request now? If not, it counts as missed, even where another pool serves it."""
        ready = self.picker.has_ready(pool, model)
        if not ready:
            self.demand.missed(request.id, pool, model, 0, self.clock())
        return ready

    def _rewritten(self, body: bytes | Body | None, outline: Outline | None, parsed: Request) -> bytes | Body | None:
        """The body to send instead of the client's; `None` if that one may go as it is."""
        if not body or (parsed.rewrite is None and parsed.members is None):
            return None
        if parsed.members is not None:
            self.metrics.salted.inc()
        if parsed.rewrite is not None:
            self.metrics.rewritten.inc()
        members = parsed.members or {}
        if isinstance(body, Body):
            assert outline is not None, "a large body was read by its outline"
            return edited(body, outline, parsed.rewrite, members)
        return rewritten(body, parsed.rewrite, members)


class _Turn:
    """A request under flow control: decided at once, or when its turn comes. What is served, by which keys and whose
    caches it keeps apart may have changed meanwhile (they are unknown without an endpoint): then it is read again."""

    __slots__ = ("_client", "_outline", "_parsed", "_request", "_router", "_version", "exchange", "spend")

    def __init__(
        self,
        router: Router,
        request: RouteRequest,
        outline: Outline | None,
        client: str | None,
        parsed: Request,
        exchange: Exchange | None,
    ) -> None:
        self._router = router
        self._request = request
        self._outline = outline
        self._client = client
        self._parsed = parsed
        self._version = router.registry.version
        """Of what it was read by."""
        self.exchange = exchange
        self.spend: Spend | None = None
        """What it counts for in its client's quota."""

    def give_back(self) -> None:
        """It went to no endpoint."""
        if self.spend is not None:
            self.spend.give_back(self._router.clock())
            self.spend = None

    def __call__(self) -> Routed:
        """Raises PickError."""
        router, version = self._router, self._router.registry.version
        if version != self._version:
            parsed = router._parsed(self._request, self._outline, partial(router._ready, self._request))
            if not isinstance(parsed, Request):
                return parsed
            self._parsed, self._version = parsed, version
            _note(self.exchange, parsed)
        try:
            routed = router._decide(self._request, self._outline, self._parsed, self._client)
        except NoEndpoints:  # another pool may serve in its place when its turn comes
            self._version = -1
            raise
        if isinstance(routed, RoutedRequest):
            routed.spend = self.spend
        return routed


def _note(exchange: Exchange | None, parsed: Request) -> None:
    """What was read of it, for observers."""
    if exchange is not None:
        exchange.priority = parsed.priority
        if parsed.asked is not None:
            exchange.model, exchange.target = parsed.asked, parsed.model or ""


def _exchange_of(ticket: Ticket[Routed]) -> Exchange | None:
    return ticket.decide.exchange if isinstance(ticket.decide, _Turn) else None


def cost(result: Routed) -> float:
    """Tokens of prompt and output that a decision is expected to take."""
    if not isinstance(result, RoutedRequest):
        return 0.0
    best = result.lease.decision.best.candidate
    return best.uncached_tokens + best.output_tokens


def _allowed(asked: PickRequest) -> int:
    """Tokens that a request is counted as until it is known what it took: its prompt, and all the output it allows."""
    if not asked.prompt_tokens_estimate:
        return 0
    most = ASSUMED_OUTPUT_TOKENS if asked.max_output_tokens is None else asked.max_output_tokens
    return asked.prompt_tokens_estimate + min(most * asked.outputs, _MOST_TOKENS)


def _may_be_asked(request: RouteRequest, engine: str) -> bool:
    """Whether this method and path is inference for an engine of this type; anything is where discovery does not tell
    it, or the proxy shows no headers. Where pools with different engines share a gateway, its edge can only know the
    union of what they serve."""
    paths = (adapter_of(engine) or ANYTHING).paths
    return not engine or not request.headers or is_inference(paths, request.headers.get(":method", ""), request.path)


def _outcome(headers: Mapping[str, str]) -> Outcome:
    if names.OVERLOADED in headers:
        return Outcome.OVERLOADED
    by_status = {"3": Outcome.REFUSED, "4": Outcome.REFUSED, "5": Outcome.ERROR}
    return by_status.get(headers.get(":status", "")[:1], Outcome.HEADERS)


def _count(headers: Mapping[str, str], name: str) -> int | None:
    text = headers.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 10 else None
