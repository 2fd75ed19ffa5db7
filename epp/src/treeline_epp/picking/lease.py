"""A lease: one decision while it is carried out."""

from __future__ import annotations

from dataclasses import dataclass

from treeline_epp.endpoints.reservations import Reservation
from treeline_epp.index.pods import Pod
from treeline_epp.picking.decision import Decision
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
