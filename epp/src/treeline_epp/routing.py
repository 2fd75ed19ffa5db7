"""One request's way through the picker: parsed, decided, reserved, and settled when its response begins."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping

from treeline_wire import headers as names

from treeline_epp import refusal
from treeline_epp.catalog import Catalog, Renderer
from treeline_epp.endpoint import Decision, Outcome, PickError
from treeline_epp.exchange import Decide, Immediate
from treeline_epp.metrics import Metrics
from treeline_epp.picker import Lease, Picker
from treeline_epp.refusal import Refusal
from treeline_epp.request import Parsed, parse
from treeline_epp.rewrite import with_model

log = logging.getLogger(__name__)


class Route:
    """A routed request. :meth:`settle` it at its response headers, and :meth:`close` it in a ``finally``.

    ``body`` is to be sent instead of the client's: the same with another model name.
    """

    __slots__ = ("_lease", "_renderer", "_router", "body", "decision")

    def __init__(
        self,
        router: Router,
        decision: Decision,
        lease: Lease,
        renderer: Renderer | None,
        body: bytes | None = None,
    ) -> None:
        self._router = router
        self._lease = lease
        self._renderer = renderer
        self.body = body
        self.decision = decision

    @property
    def destination(self) -> str:
        """The destination list, best first, as header and metadata carry it."""
        return ",".join(self.decision.destinations)

    def settle(self, headers: Mapping[str, str], served: str | None) -> None:
        """The response begins: its headers (lower-case names) and, if the proxy tells, who served it."""
        router, now = self._router, self._router.clock()
        outcome = _outcome(headers)
        cached, prompt = _count(headers, names.CACHED_TOKENS), _count(headers, names.PROMPT_TOKENS)
        # Headers of a stream come with its first token; those of a whole answer with its last.
        streams = headers.get("content-type", "").startswith("text/event-stream")
        ttft = now - self._lease.opened_at if streams and prompt is not None else None
        if not self._lease.close(
            now, outcome, served=served, ttft_s=ttft, cached_tokens=cached, prompt_tokens=prompt
        ):
            return
        metrics = router.metrics
        metrics.ended(outcome)
        if ttft is not None:
            metrics.ttft_seconds.observe(ttft)
        elsewhere = served is not None and served != self.decision.endpoint.address
        if elsewhere:
            listed = any(served == spec.address for spec in self.decision.fallbacks)
            metrics.elsewhere.labels("fallback" if listed else "other").inc()
        elif cached is not None and prompt is not None:
            metrics.predicted_hit_tokens.inc(self.decision.cached_tokens)
            metrics.reported_hit_tokens.inc(cached)
            metrics.reported_prompt_tokens.inc(prompt)
        if prompt is not None and self._renderer is not None and self.decision.request.key is not None:
            self._renderer.learn(len(self.decision.request.key), prompt)
        if elsewhere or outcome is Outcome.ERROR:
            router.on_trouble(self.decision.endpoint.name)

    def close(self) -> None:
        """The stream has ended. Without a response before it the client went away, or the proxy gave up."""
        if self._lease.close(self._router.clock(), Outcome.CANCELLED):
            self._router.metrics.ended(Outcome.CANCELLED)


class Router:
    """Makes routes. ``on_trouble(name)`` is called when an endpoint seems to have failed a request; ``draw()`` in
    [0, 1) chooses among weighted targets."""

    def __init__(
        self,
        picker: Picker,
        catalog: Catalog,
        metrics: Metrics,
        *,
        on_trouble: Callable[[str], None] = lambda _name: None,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.picker = picker
        self.catalog = catalog
        self.metrics = metrics
        self.on_trouble = on_trouble
        self.clock = clock
        self.draw = draw

    def route(self, decide: Decide) -> Route | Refusal | Immediate:
        """Where the request goes, or what the client is told instead. Never raises."""
        started = time.perf_counter()
        try:
            result = self._route(decide)
        except PickError as error:
            result = refusal.of_pick(error)
        except Exception:
            log.exception("request %s: the picker failed", decide.headers.get(names.REQUEST_ID, ""))
            self.metrics.defects.inc()
            result = refusal.defect()
        if isinstance(result, Refusal):
            self.metrics.refusals.labels(result.code).inc()
        self.metrics.pick_seconds.observe(time.perf_counter() - started)
        return result

    def _route(self, decide: Decide) -> Route | Refusal | Immediate:
        parsed = parse(decide, self.catalog, draw=self.draw(), ready=self.picker.has_ready)
        if not isinstance(parsed, Parsed):
            return parsed
        now = self.clock()
        decision = self.picker.pick(parsed.pick, now)
        lease = self.picker.reserve(decision, now)
        self.metrics.decided(decision.endpoint.name)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("decision", extra={"fields": decision.explain()})
        body = None
        if parsed.rewrite is not None and decide.body:
            body = with_model(decide.body, parsed.rewrite)
            self.metrics.rewritten.inc()
        return Route(self, decision, lease, parsed.renderer, body)


def _outcome(headers: Mapping[str, str]) -> Outcome:
    if names.OVERLOADED in headers:
        return Outcome.OVERLOADED
    return Outcome.ERROR if headers.get(":status", "")[:1] == "5" else Outcome.HEADERS


def _count(headers: Mapping[str, str], name: str) -> int | None:
    text = headers.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 10 else None
