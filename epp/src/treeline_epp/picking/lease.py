"""A lease: one decision while it is carried out, and what other pickers of the pool are told of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from treeline_epp.endpoints.reservations import Reservation
from treeline_epp.index.pods import Match, Pod
from treeline_epp.picking.decision import Decision, Outcome
from treeline_epp.picking.endpoint import Endpoint


@dataclass(eq=False, slots=True)
class Lease:
    """What the picker must remember of a decision. It opens leases (`Picker.reserve`) and closes them (`Picker.close`).
    `pod` is the rank of the endpoint that is expected to hold the prompt.

    `queued_tokens` were before the request when it was picked; `predicted_until` names the prediction that its prompt
    will be held, None without one.
    """

    decision: Decision
    endpoint: Endpoint
    pod: Pod
    opened_at: float
    queued_tokens: int
    reservation: Reservation
    predicted_until: float | None = None
    closed: bool = False


class Elsewhere(Protocol):
    """The other pickers of the pool and their requests: the seam that `treeline_epp.peers` fills."""

    def opened(self, lease: Lease, now: float) -> None:
        """The others are to know of this lease."""
        ...

    def closed(self, lease: Lease, outcome: Outcome, *, began: bool) -> None:
        """They are to know how it ended. `began`: with the first token, by the endpoint that was picked; otherwise an
        outcome of HEADERS says nothing of its prefill."""
        ...

    def foreseen(self, match: Match, scope: str, namespace: str | None, key: bytes, now: float) -> Match:
        """The match, and what the requests that others have sent are expected to leave in caches."""
        ...
