"""`manual`: a request header names the endpoint, where clients may choose it (`--trust-request-headers`)."""

from __future__ import annotations

from random import Random

from msgspec import Struct

from treeline_epp.picking.candidates import Candidates
from treeline_epp.picking.decision import NoEndpoints
from treeline_epp.picking.policies.base import HeaderName, Policy
from treeline_epp.picking.policies.predicted_ttft import cheapest_first
from treeline_epp.picking.request import PickRequest

_SHOWN = 128


class ManualParameters(Struct, frozen=True, forbid_unknown_fields=True):
    """`header` has the endpoint's name, or its address."""

    header: HeaderName = "x-treeline-endpoint"


class Manual(Policy):
    """Who names an endpoint gets it and no fallback, or is refused where it is no candidate. Requests without the
    header go where `predicted_ttft` sends them."""

    name = "manual"
    parameters = ManualParameters

    def __init__(self, parameters: ManualParameters, rng: Random) -> None:
        self._set = parameters
        self._rng = rng

    @property
    def headers(self) -> tuple[str, ...]:
        return (self._set.header,)

    def rank(self, request: PickRequest, candidates: Candidates, count: int) -> list[int]:
        """O(log n) with the header, O(n) without it."""
        named = (request.headers or {}).get(self._set.header, "").strip()
        if not named:
            return cheapest_first(candidates.cost_s, candidates, count, self._rng)
        at = candidates.find(named)
        if at is None:
            raise NoEndpoints(
                f"{self._set.header} names {named[:_SHOWN]!r}, which is no ready endpoint for this request"
            )
        return [at]
