"""Prompts that another endpoint computes: asks it, and takes its answer, a failure, or the client's leaving."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from treeline_wire import headers as names

from treeline_epp.endpoints.prefill_calls import PrefillCall, PrefillCalls
from treeline_epp.metrics import Sample
from treeline_epp.picking.decision import FORMS, Lease, Outcome
from treeline_epp.picking.parts import Parts
from treeline_epp.requests.body import Body, RouteRequest
from treeline_epp.requests.handover import BadHandover, Handover, handover, pages_at
from treeline_epp.requests.outline import Outline
from treeline_epp.requests.rewrite import to_send

log = logging.getLogger(__name__)

MOST_S = 600.0
"""Longest that a prompt may take. While a request waits for it, the limit is three times its prediction …"""
PATIENCE_S = 10.0
"""… but not less than this: predictions may be wrong until an endpoint has been measured, and each prompt measures it.
"""
_ABORT_S, _UNDER_WAY_S = 5.0, 1.0
"""Longest that an abort may take; and how long after a failure it is sent: the request may still be on its way."""
_PASSED_ON = (names.REQUEST_ID, names.TRACEPARENT, names.TRACESTATE, names.CLIENT, names.ISOLATION)
"""Headers of the client's request that the prefill engine gets, too: for its log, for traces, and for our runtime to
know whose cache it is."""


@dataclass(eq=False)
class Prefilling:
    """The prompts that other endpoints compute; `on_trouble(name)` is called when one seems to have failed."""

    parts: Parts
    calls: PrefillCalls
    clock: Callable[[], float]
    on_trouble: Callable[[str], None] = lambda _name: None
    forms: Counter[str] = field(default_factory=Counter)
    first_token_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(FORMS, 0.0))
    """Predicted seconds to the first token, by form."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Counts of prompts asked for, by the way they ended."""
    predicted_s: float = 0.0
    actual_s: float = 0.0
    """Sums over the prompts that were computed."""
    _calls: dict[Lease, PrefillCall] = field(default_factory=dict)

    def begin(self, lease: Lease, asked: RouteRequest, outline: Outline | None) -> PrefillCall | None:
        """Hand over a request whose prompt another endpoint computes: change what its endpoint gets, and ask the other
        one. Returns the call to wait for, None where there is none.
        """
        decision, part = lease.decision, lease.prefill
        if lease.closed:
            return None
        self.forms[decision.form] += 1
        self.first_token_s[decision.form] += decision.ttft_s
        if part is None:
            if decision.form == "pull" and decision.source is not None:
                lease.added += (pages_at(decision.source),)
            return None
        prefill, now = part.endpoint.spec, self.clock()
        plan = handover(prefill, decision.endpoint, asked.path, random.SystemRandom().getrandbits(63))
        lease.members = plan.members
        if not plan.waits:
            lease.added += plan.headers
        if plan.copy is None:
            return None
        body = to_send(asked.body, outline, decision.request, plan.copy)
        assert body is not None, "only requests with a body are handed over"
        headers = {name: asked.headers[name] for name in _PASSED_ON if name in asked.headers}
        if (rank := prefill.rank_for(asked.path)) is not None:
            headers[names.RANK] = str(rank)
        # Once both engines have it, only they know whether it gets on.
        limit_s = min(MOST_S, max(PATIENCE_S, part.reservation.expires_at - now)) if plan.waits else MOST_S
        part.reservation.expires_at = now + limit_s
        call = self.calls.post(
            prefill.server,
            prefill.address,
            asked.path,
            headers,
            body.pieces() if isinstance(body, Body) else [body],
            limit_s=limit_s,
            until_sent=not plan.waits,
            ended=lambda call: self._ended(lease, plan, call, now),
        )
        if call is None:
            self._end(lease, Outcome.CANCELLED, "too many prompts are computed apart, or it has gone")
            return None
        part.called = True
        self._calls[lease] = call
        return call

    def failed(self, lease: Lease) -> bool:
        """Return whether nobody computes the prompt: the other endpoint does not, and this one cannot. The request
        needs another decision.
        """
        decision = lease.decision
        apart = decision.prefill is not None and not lease.closed
        return apart and not decision.endpoint.alone and not lease.members

    def drop(self, lease: Lease) -> None:
        """Take the client's leaving: nobody wants the prompt."""
        if (call := self._calls.pop(lease, None)) is not None:
            call.cancel()
            self._end(lease, Outcome.CANCELLED)

    def _ended(self, lease: Lease, plan: Handover, call: PrefillCall, began: float) -> None:
        if self._calls.pop(lease, None) is None:
            return
        outcome, why = self._outcome(lease, plan, call)
        took_s = self.clock() - began
        if outcome is Outcome.HEADERS and (prefill := lease.decision.prefill) is not None:
            self.predicted_s += prefill.ttft_s
            self.actual_s += took_s
        dispatched = call.done
        told = plan.waits and (outcome is Outcome.HEADERS or took_s >= call.limit_s)
        self._end(lease, outcome, why, took_s if told else 0.0)
        if dispatched and outcome is not Outcome.HEADERS:
            spec = lease.endpoint.spec  # it waits for the prompt, for minutes
            body = [plan.abort]
            self.calls.post(
                spec.server, spec.address, "/abort_request", {}, body, limit_s=_ABORT_S, after_s=_UNDER_WAY_S
            )

    def _outcome(self, lease: Lease, plan: Handover, call: PrefillCall) -> tuple[Outcome, str]:
        answer = call.answer
        if answer is None:
            return Outcome.ERROR, call.problem
        if answer.status != 200:
            refused = 300 <= answer.status < 500
            return Outcome.REFUSED if refused else Outcome.ERROR, f"its answer is {answer.status}"
        if plan.waits:
            try:
                lease.members = {**plan.members, **plan.place(answer.body)}
            except BadHandover as error:
                return Outcome.ERROR, str(error)
            lease.added += plan.headers
        return Outcome.HEADERS, ""

    def _end(self, lease: Lease, outcome: Outcome, why: str = "", took_s: float = 0.0) -> None:
        part = lease.prefill
        assert part is not None, "it ends once"
        self.outcomes[outcome] += 1
        if why:
            lease.members = {}
            id, name = lease.decision.request.request_id, part.endpoint.spec.name
            log.info("request %s: no prompt from %s: %s", id, name, why)
        if outcome is Outcome.ERROR:
            self.on_trouble(part.endpoint.spec.server)
        self.parts.prefilled(lease, outcome, self.clock(), took_s)

    def samples(self) -> Iterator[Sample]:
        """Yield samples for the metrics page."""
        for form in FORMS:
            text = "Requests by form: whole; apart: another endpoint computes the prompt; pull: it has a part of it."
            yield "counter", "forms", text, {"form": form}, self.forms[form]
            text = "Predicted seconds to the first token of requests, by form."
            yield "counter", "forms_predicted_seconds", text, {"form": form}, self.first_token_s[form]
        text = "Prompts that the picker has asked prefill endpoints for and that are not computed yet."
        yield "gauge", "prefills_in_flight", text, {}, len(self.calls)
        for outcome in Outcome:
            text = "Prompts that the picker asked prefill endpoints for, by how that ended."
            yield "counter", "prefills", text, {"outcome": outcome}, self.outcomes[outcome]
        text = "Predicted seconds until prefill endpoints had computed prompts, over those that they did compute."
        yield "counter", "prefill_predicted_seconds", text, {}, self.predicted_s
        text = "Seconds until prefill endpoints had computed prompts, over those that they did compute."
        yield "counter", "prefill_seconds", text, {}, self.actual_s
