"""The parts of requests at endpoints: reserved work, and the prediction that the endpoint will hold the prompt.

A request has one part at the endpoint that answers it, and another one where a prefill endpoint computes its prompt.
Requests of other pickers have reservations alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from treeline_epp.endpoints.reservations import Reservation
from treeline_epp.index.index import Index
from treeline_epp.picking.decision import Lease, Outcome, Part
from treeline_epp.picking.endpoint import Endpoint
from treeline_epp.picking.request import Request
from treeline_epp.picking.score import Scored
from treeline_epp.picking.table import Table


@dataclass(frozen=True, slots=True)
class Parts:
    """Opens and ends the parts of requests; `table` learns which endpoints have changed."""

    index: Index
    table: Table
    reserved: set[Endpoint]
    """The endpoints that may have reservations."""

    def open(
        self, request: Request, endpoint: Endpoint, scored: Scored, tokens: int, prefill_s: float, now: float
    ) -> Part:
        """Open a part with `tokens` to compute, which should take `prefill_s`. O(prompt bytes)."""
        pod, queued_tokens = endpoint.expecting(scored.candidate.rank), endpoint.load.queue(now)[0]
        part = Part(endpoint, pod, self.charge(endpoint, tokens, prefill_s, now), queued_tokens)
        if request.key:
            namespace = request.namespace_at(endpoint.spec)
            part.predicted_until = self.index.predict(pod, namespace, request.key, scored.candidate.hit, now)
        return part

    def withdraw(self, request: Request, part: Part) -> None:
        """Drop the prediction: the endpoint did not do this prefill, and will not hold the prompt."""
        if part.predicted_until is not None and request.key and part.pod.bit:
            namespace = request.namespace_at(part.endpoint.spec)
            self.index.withdraw(part.pod, namespace, request.key, part.predicted_until)

    def prefilled(self, lease: Lease, outcome: Outcome, now: float, took_s: float = 0.0) -> None:
        """Take the end of a prompt's computation at a prefill endpoint, which took so long (or longer), if that is
        known. If it failed, the endpoint that answers computes the prompt. Does nothing the second time.
        """
        part, lease.prefill = lease.prefill, None
        if part is None:
            return
        part.endpoint.load.train(part.reservation.tokens, part.queued_tokens, took_s, now)
        self.discharge(part.endpoint, part.reservation, outcome, now, began=True)
        if outcome is Outcome.ERROR:
            part.endpoint.breaker.on_error(now)
        elif outcome is not Outcome.CANCELLED:
            part.endpoint.breaker.on_answer()
        if outcome is Outcome.HEADERS:
            return
        self.withdraw(lease.decision.request, part)
        if not lease.closed:
            answer, best = lease.answer, lease.decision.best
            self.discharge(answer.endpoint, answer.reservation, Outcome.CANCELLED, now, began=False)
            answer.reservation = self.charge(answer.endpoint, best.candidate.uncached_tokens, best.ttft_s, now)

    # Reservations

    def charge(self, endpoint: Endpoint, tokens: int, prefill_s: float, now: float, age_s: float = 0.0) -> Reservation:
        """Reserve `tokens` of prefill, which should take `prefill_s`, until `discharge`; `age_s` of that are over, if
        the request is another picker's. O(1).
        """
        reservation = endpoint.load.reservations.open(tokens, now, prefill_s)
        reservation.expires_at -= age_s
        reservation.done_at -= age_s
        self.reserved.add(endpoint)
        self.touch(endpoint)
        return reservation

    def discharge(
        self, endpoint: Endpoint, reservation: Reservation, outcome: Outcome, now: float, *, began: bool
    ) -> None:
        """End a reservation. Breakers do not count it: each picker judges errors by its own requests. O(1)."""
        if outcome is Outcome.HEADERS:
            endpoint.load.on_answered(reservation, now, began=began)
        else:
            endpoint.load.reservations.close(reservation)
        if outcome is Outcome.OVERLOADED:
            endpoint.load.on_overloaded(now)
        self.touch(endpoint)

    def expire(self, now: float) -> None:
        """End reservations that are past their time. O(open reservations)."""
        for endpoint in list(self.reserved):
            reservations = endpoint.load.reservations
            if reservations.expire(now):
                self.touch(endpoint)
            if not reservations:
                self.reserved.discard(endpoint)

    def touch(self, endpoint: Endpoint) -> None:
        """Mark an endpoint whose load, breaker or state has changed. O(1)."""
        if endpoint.pod.row >= 0:
            self.table.touch(endpoint.pod.row)
