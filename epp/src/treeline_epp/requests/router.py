"""One request's way through the picker: parsed, decided, reserved, and completed when its response begins."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace

from treeline_wire import headers as names
from treeline_wire.paths import is_inference

from treeline_epp.endpoints.adapters.registry import ANYTHING, adapter_of
from treeline_epp.keyers.base import Keyer
from treeline_epp.metrics import Metrics
from treeline_epp.picking.decision import Outcome, PickError
from treeline_epp.picking.lease import Lease
from treeline_epp.picking.picker import Picker
from treeline_epp.requests import refusals
from treeline_epp.requests.body import Body
from treeline_epp.requests.isolation import NO_ISOLATION, Isolation
from treeline_epp.requests.messages import Immediate, RouteRequest
from treeline_epp.requests.model_registry import ModelRegistry
from treeline_epp.requests.outline import Outline
from treeline_epp.requests.parse import ParsedRequest, parse
from treeline_epp.requests.refusals import Refusal
from treeline_epp.requests.rewrite import edited, rewritten

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class RoutedRequest:
    """A request that goes to an endpoint. `body` is to be sent instead of the client's: the same with another model
    name, or with the client's salt. The rest is for the router, when the response begins (`Router.complete`) or the
    stream has ended (`Router.release`)."""

    lease: Lease
    keyer: Keyer | None
    body: bytes | Body | None
    client: str | None

    @property
    def destination(self) -> str:
        """The destination list, best first, as header and metadata carry it."""
        return ",".join(self.lease.decision.destinations)


@dataclass(eq=False)
class Router:
    """Takes requests to the picker, and its feedback. `on_trouble(name)` is called when an endpoint seems to have
    failed one; `draw()` in [0, 1) chooses among weighted targets.

    A proxy may ask more than once for one request: Envoy AI Gateway 1.0 puts a filter of ours into the chain for each
    match of a pool's routes. Who asks again with the destination that it was just given gets that one again, and the
    request counts once.
    """

    picker: Picker
    registry: ModelRegistry
    metrics: Metrics
    _: KW_ONLY
    on_trouble: Callable[[str], None] = lambda _name: None
    isolation: Isolation = NO_ISOLATION
    clock: Callable[[], float] = time.monotonic
    draw: Callable[[], float] = random.random
    _routed: dict[str, RoutedRequest] = field(default_factory=dict)
    """Requests whose response has not begun, by their id."""

    def route(self, request: RouteRequest, outline: Outline | None = None) -> RoutedRequest | Refusal | Immediate:
        """Where the request goes, or what the client is told instead. Never raises.

        `outline` as for `request.parse`.
        """
        known = self._routed.get(request.id)
        if known is not None and request.headers.get(names.DESTINATION) == known.destination:
            return replace(known, body=None)
        started = time.perf_counter()
        try:
            result = self._route(request, outline)
        except PickError as error:
            result = refusals.of_pick(error)
        except Exception:
            log.exception("request %s: the picker failed", request.id)
            self.metrics.internal_errors.inc()
            result = refusals.internal_error()
        if isinstance(result, Refusal):
            self.metrics.refusals.labels(result.code).inc()
        self.metrics.pick_seconds.observe(time.perf_counter() - started)
        return result

    def complete(self, routed: RoutedRequest, headers: Mapping[str, str], served: str | None) -> None:
        """The response begins: its headers (lower-case names) and, if the proxy tells, who served it."""
        now, lease = self.clock(), routed.lease
        self._forget(lease)
        decision, metrics = lease.decision, self.metrics
        outcome = _outcome(headers)
        cached, prompt = _count(headers, names.CACHED_TOKENS), _count(headers, names.PROMPT_TOKENS)
        # Headers of a stream come with its first token; those of a whole answer with its last.
        streams = headers.get("content-type", "").startswith("text/event-stream")
        ttft = now - lease.opened_at if streams and prompt is not None else None
        if not self.picker.close(
            lease, now, outcome, served=served, ttft_s=ttft, cached_tokens=cached, prompt_tokens=prompt
        ):
            return
        metrics.ended(outcome)
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
        elif routed.keyer is not None and hit.tokens:  # engines that tell nothing in headers tell by their events
            routed.keyer.learn(hit.end, hit.tokens)
        if by_other or outcome is Outcome.ERROR:
            self.on_trouble(decision.endpoint.name)

    def release(self, routed: RoutedRequest) -> None:
        """The stream has ended. Without a response before it the client went away, or the proxy gave up."""
        self._forget(routed.lease)
        if self.picker.close(routed.lease, self.clock(), Outcome.CANCELLED):
            self.metrics.ended(Outcome.CANCELLED)

    def _forget(self, lease: Lease) -> None:
        id = lease.decision.request.request_id
        if (known := self._routed.get(id)) is not None and known.lease is lease:
            del self._routed[id]

    def _route(self, request: RouteRequest, outline: Outline | None) -> RoutedRequest | Refusal | Immediate:
        client = self.isolation.client(request.headers)
        self.metrics.asked(client)
        parsed = parse(
            request,
            self.registry,
            outline=outline,
            draw=self.draw(),
            ready=self.picker.has_ready,
            isolation=self.isolation,
        )
        if not isinstance(parsed, ParsedRequest):
            return parsed
        now = self.clock()
        decision = self.picker.pick(parsed.pick, now)
        if not _may_be_asked(request, decision.endpoint.engine):
            return refusals.path_not_served()
        lease = self.picker.reserve(decision, now)
        self.metrics.decided(decision.endpoint.name)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("decision", extra={"fields": decision.explain()})
        if parsed.pick.key_tokens_estimate is not None:
            self.metrics.bounded_prompts.inc()
        routed = RoutedRequest(lease, parsed.keyer, self._rewritten(request.body, parsed), client)
        if request.id:
            self._routed[request.id] = routed
        return routed

    def _rewritten(self, body: bytes | Body | None, parsed: ParsedRequest) -> bytes | Body | None:
        """The body to send instead of the client's; `None` if that one may go as it is."""
        if not body or (parsed.rewrite is None and parsed.members is None):
            return None
        if parsed.members is not None:
            self.metrics.salted.inc()
        if parsed.rewrite is not None:
            self.metrics.rewritten.inc()
        members = parsed.members or {}
        if isinstance(body, Body):
            assert parsed.outline is not None, "a large body was read by its outline"
            return edited(body, parsed.outline, parsed.rewrite, members)
        return rewritten(body, parsed.rewrite, members)


def _may_be_asked(request: RouteRequest, engine: str) -> bool:
    """Whether this method and path is inference for an engine of this type; anything is where discovery does not tell
    it. Where pools with different engines share a gateway, its edge can only know the union of what they serve."""
    paths = (adapter_of(engine) or ANYTHING).paths
    return not engine or is_inference(paths, request.headers.get(":method", ""), request.path)


def _outcome(headers: Mapping[str, str]) -> Outcome:
    if names.OVERLOADED in headers:
        return Outcome.OVERLOADED
    return Outcome.ERROR if headers.get(":status", "")[:1] == "5" else Outcome.HEADERS


def _count(headers: Mapping[str, str], name: str) -> int | None:
    text = headers.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 10 else None
