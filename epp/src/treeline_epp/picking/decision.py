"""The picker's decisions, how they end, and the errors without one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from msgspec import Struct

from treeline_epp.endpoints.reservations import Reservation
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.index.pods import Match, Pod
from treeline_epp.picking.endpoint import Endpoint
from treeline_epp.picking.request import Request
from treeline_epp.picking.score import Scored


@dataclass(eq=False, slots=True)
class Lease:
    """A request with a destination, until its response has begun. The picker opens leases (`Picker.reserve`) and closes
    them (`Picker.close`): the endpoint's reservation, and the prediction that it will hold the prompt, last as long.
    `added` are request headers to send to the endpoint; those with None are removed. `pod` is its rank that is
    predicted to hold the prompt.

    `queued_tokens` were before the request when it was picked; `predicted_until` names the prediction of its prompt,
    None without one. `prefill` is the endpoint that computes the prompt, if another one does, and its reservation.
    """

    decision: Decision
    endpoint: Endpoint
    pod: Pod
    opened_at: float
    queued_tokens: int
    reservation: Reservation
    predicted_until: float | None = None
    prefill: tuple[Endpoint, Reservation] | None = None
    closed: bool = False
    added: tuple[tuple[str, str | None], ...] = ()

    @property
    def destination(self) -> str:
        """The destination list, best first, in the form of header and metadata."""
        return ",".join(self.decision.destinations)


class Elsewhere(Protocol):
    """The other pickers of the pool and their requests: the seam that `treeline_epp.peers` fills."""

    def opened(self, lease: Lease, now: float) -> None:
        """Report a new lease to the others."""
        ...

    def closed(self, lease: Lease, outcome: Outcome, *, began: bool) -> None:
        """Report a lease's end to the others. `began`: it ended with the first token, from the endpoint that was
        picked; otherwise an outcome of HEADERS says nothing of its prefill.
        """
        ...

    def foreseen(self, match: Match, scope: str, namespace: str | None, key: bytes, now: float) -> Match:
        """Return the match, extended by the prefixes that others' requests are expected to leave in caches."""
        ...


class PickError(Exception):
    """There is no destination. `status` is the HTTP status for the client, `reason` the value for
    `x-llm-d-request-dropped-reason` and for metrics, `code` that of the client's error; `retry_after_s` says when to
    come back, `headers` are further headers of the response.
    """

    def __init__(
        self,
        message: str,
        status: int = 500,
        reason: str = "internal",
        code: str = "internal_error",
        retry_after_s: float = 1.0,
        headers: tuple[tuple[str, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.code = code
        self.retry_after_s = retry_after_s
        self.headers = headers


class NoEndpoints(PickError):
    """No endpoint is ready for this request: none known, none ready, or the subset leaves none. 503."""

    def __init__(self, message: str) -> None:
        super().__init__(message, 503, "rejected-no-endpoints", "no_endpoints")


class Saturated(PickError):
    """Endpoints are ready, but the queue of each is too long for a request that may be shed. 429; `retry_after_s` is a
    guess from the queues."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message, 429, "rejected-saturated", "saturated", retry_after_s)


class FlowRefused(PickError):
    """Flow control refused the request: it waited too long, or could not wait; or its client's quota is used up."""


class Outcome(StrEnum):
    """The way in which a lease ends. The values are metric labels."""

    HEADERS = "headers"  # the endpoint answered: its prefill is done
    REFUSED = "refused"  # the endpoint refused the request (a 4xx): it works, and computed nothing
    ERROR = "error"  # the endpoint failed, or answered with an error
    OVERLOADED = "overloaded"  # 503 with x-treeline-overloaded: the endpoint has no room
    CANCELLED = "cancelled"  # the client went away first


class Decision(Struct, frozen=True):
    """The destination of a request, and the scores behind it.

    `ranked` are the best endpoints among those scored, the chosen one first. `fallbacks` follow it in the destination
    list; no address occurs twice. `prefill` computes the prompt, and the chosen endpoint the answer; None: one does
    both. No policy sets `prefill` yet, and no prompt is predicted there.
    """

    request: Request
    ranked: tuple[Scored, ...]
    fallbacks: tuple[EndpointSpec, ...]
    policy: str
    prefill: Scored | None = None

    @property
    def best(self) -> Scored:
        """The chosen endpoint, and the request's cost there."""
        return self.ranked[0]

    @property
    def endpoint(self) -> EndpointSpec:
        """The chosen endpoint."""
        return self.best.candidate.spec

    @property
    def terms(self) -> dict[str, dict[str, float]]:
        """Endpoint name → term → value: seconds end in `_s`, tokens in `_tokens`; `cost_s` is what was compared."""
        return {scored.candidate.spec.name: scored.terms for scored in self.ranked}

    @property
    def destinations(self) -> tuple[str, ...]:
        """The addresses in order of preference."""
        return (self.endpoint.address, *(spec.address for spec in self.fallbacks))

    def explain(self) -> dict[str, Any]:
        """One flat record for a structured log line."""
        return {
            "request_id": self.request.request_id,
            "model": self.request.model,
            "priority": self.request.priority,
            "endpoint": self.endpoint.name,
            "fallbacks": [spec.name for spec in self.fallbacks],
            "policy": self.policy,
            "predicted_ttft_s": round(self.best.ttft_s, 6),
            "cached_tokens": self.best.candidate.cached_tokens,
            "uncached_tokens": self.best.candidate.uncached_tokens,
            "terms": {name: {term: round(v, 6) for term, v in terms.items()} for name, terms in self.terms.items()},
        }
