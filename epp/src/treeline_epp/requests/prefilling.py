"""Prompts that another endpoint computes: asks it, and takes its answer, a failure, or the client's leaving."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from treeline_wire import headers as names

from treeline_epp.endpoints.http_answer import Answer
from treeline_epp.endpoints.prefill_calls import PrefillCalls
from treeline_epp.flow.ticket import Awaited
from treeline_epp.metrics import Sample
from treeline_epp.picking.decision import FORMS, Lease, Outcome
from treeline_epp.picking.parts import Parts
from treeline_epp.requests.body import Body, RouteRequest
from treeline_epp.requests.handover import BadHandover, Handover, handover, pages_at
from treeline_epp.requests.outline import Outline
from treeline_epp.requests.rewrite import to_send

log = logging.getLogger(__name__)

MOST_S = 600.0
"""Longest that a prompt may take. If the other engine can compute it as well, the limit is three times its prediction …
"""
PATIENCE_S = 10.0
"""… but not less than this: predictions may be wrong until an endpoint has been measured, and each prompt measures it.
"""
_PASSED_ON = (names.REQUEST_ID, names.TRACEPARENT, names.TRACESTATE, names.CLIENT, names.ISOLATION)
"""Headers of the client's request that the prefill engine gets, too: for its log, for traces, and for our runtime to
know whose cache it is."""


@dataclass(eq=False, slots=True)
class Prefill(Awaited):
    """A prompt that another endpoint computes. `done`: its request need not wait any longer, because the answer is
    there, or because that endpoint has the request, if that is enough. It takes `limit_s` at most.
    """

    lease: Lease
    plan: Handover
    began: float
    limit_s: float

    def on_sent(self) -> None:
        """The endpoint has the request."""
        if not self.plan.waits:
            self.lease.added += self.plan.headers
            self.finish()

    def finish(self) -> None:
        """Let its request go on."""
        self._end()


@dataclass(eq=False)
class Prefilling:
    """The prompts that other endpoints compute; `on_trouble(name)` is called when one seems to have failed."""

    parts: Parts
    calls: PrefillCalls
    clock: Callable[[], float]
    on_trouble: Callable[[str], None] = lambda _name: None
    forms: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    """Counts of prompts asked for, by the way they ended."""

    def begin(self, lease: Lease, asked: RouteRequest, outline: Outline | None) -> Prefill | None:
        """Hand over a request whose prompt another endpoint computes: change what its endpoint gets, and ask the other
        one. Returns what to wait for, None if that is nothing.
        """
        decision, part = lease.decision, lease.prefill
        if lease.closed:
            return None
        self.forms[decision.form] += 1
        if part is None:
            if decision.form == "pull" and decision.source is not None:
                lease.added += (pages_at(decision.source),)
            return None
        prefill, now = part.endpoint.spec, self.clock()
        within_s, room = min(MOST_S, part.reservation.expires_at - now), random.SystemRandom().getrandbits(63)
        plan = handover(prefill, decision.endpoint, asked.path, room, within_s)
        lease.members = plan.members
        if plan.copy is None:
            lease.added += plan.headers
            return None
        body = to_send(asked.body, outline, decision.request, plan.copy)
        assert body is not None, "only requests with a body are handed over"
        headers = {name: asked.headers[name] for name in _PASSED_ON if name in asked.headers}
        if (rank := prefill.rank_for(asked.path)) is not None:
            headers[names.RANK] = str(rank)
        # Where the other engine waits for it, however long, only they know whether it gets on.
        limit_s = MOST_S if plan.abort else max(PATIENCE_S, within_s)
        part.reservation.expires_at = now + limit_s
        prompt = Prefill(lease, plan, now, limit_s)
        part.cancel = self.calls.post(
            prefill.server,
            prefill.address,
            asked.path,
            headers,
            list(body.pieces()) if isinstance(body, Body) else [body],
            client=decision.request.client,
            within_s=limit_s,
            sent=prompt.on_sent,
            ended=partial(self._ended, prompt),
        )
        if part.cancel is None:
            self._end(lease, Outcome.CANCELLED, "too many prompts are computed apart, or it has gone")
            return None
        return prompt

    def failed(self, lease: Lease) -> bool:
        """Return whether nobody computes the prompt: the other endpoint does not, and this one cannot. The request
        needs another decision.
        """
        decision = lease.decision
        apart = decision.prefill is not None and not lease.closed
        return apart and not decision.endpoint.alone and not lease.members

    def drop(self, lease: Lease) -> None:
        """Take the client's leaving, or the other endpoint's refusal: nobody wants the prompt."""
        if (part := lease.prefill) is not None and part.cancel is not None:
            part.cancel()
            self._end(lease, Outcome.CANCELLED)

    def _ended(self, prompt: Prefill, answer: Answer | None, problem: str) -> None:
        lease, plan, dispatched = prompt.lease, prompt.plan, prompt.done
        if lease.prefill is None:  # nobody wants it any more
            return
        outcome, why, found = _outcome(plan, answer, problem)
        took_s = self.clock() - prompt.began
        if outcome is Outcome.HEADERS:
            lease.members = {**plan.members, **found}
        told = not plan.abort and (outcome is Outcome.HEADERS or took_s >= prompt.limit_s)
        self._end(lease, outcome, why, took_s if told else 0.0)
        prompt.finish()
        if plan.abort and dispatched and outcome is not Outcome.HEADERS:
            spec = lease.endpoint.spec  # it waits for the prompt, for minutes
            self.calls.abort(spec.server, spec.address, plan.abort)

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
        text = "Requests by form: whole; apart: another endpoint computes the prompt; pull: it has a part of it."
        for form in FORMS:
            yield "counter", "forms", text, {"form": form}, self.forms[form]
        text = "Prompts that the picker has asked prefill endpoints for and that are not computed yet."
        yield "gauge", "prefills_in_flight", text, {}, len(self.calls)
        text = "Prompts that the picker asked prefill endpoints for, by how that ended."
        for outcome in Outcome:
            yield "counter", "prefills", text, {"outcome": outcome}, self.outcomes[outcome]


def _outcome(plan: Handover, answer: Answer | None, problem: str) -> tuple[Outcome, str, Mapping[str, Any]]:
    """Return how a prompt's computation ended, what is wrong, and the members that say where it is."""
    if answer is None:
        return Outcome.ERROR, problem, {}
    if answer.status != 200:
        refused = 300 <= answer.status < 500
        return Outcome.REFUSED if refused else Outcome.ERROR, f"its answer is {answer.status}", {}
    try:
        return Outcome.HEADERS, "", plan.place(answer.body) if plan.waits else {}
    except BadHandover as error:
        return Outcome.ERROR, str(error), {}
