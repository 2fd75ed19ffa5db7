"""What the picker decides, how it ends, and the two ways to say no."""

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
    `added` are request headers that go on to the endpoint. `pod` is the rank of it that is to hold the prompt.

    `queued_tokens` were before the request when it was picked; `predicted_until` names the prediction that its prompt
    will be held, None without one. `prefill` is charged besides where the prompt is computed elsewhere: the endpoint,
    and its reservation.
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
    added: tuple[tuple[str, str], ...] = ()

    @property
    def destination(self) -> str:
        """The destination list, best first, as header and metadata carry it."""
        return ",".join(self.decision.destinations)


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


class PickError(Exception):
    """No destination can be given. `status` is the HTTP status for the client, `reason` the value for
    `x-llm-d-request-dropped-reason` and for metrics, `code` that of the client's error; `retry_after_s` says when to
    come back, `headers` are those of the response besides."""

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
    """It waited in the picker, or would have had to; or its client has had what it may have."""


class Outcome(StrEnum):
    """How a lease ends. The values are metric labels."""

    HEADERS = "headers"  # the endpoint answered: its prefill is done
    REFUSED = "refused"  # the endpoint refused the request (a 4xx): it works, and has computed nothing
    ERROR = "error"  # the endpoint failed, or answered with an error
    OVERLOADED = "overloaded"  # 503 with x-treeline-overloaded: it refused for want of room
    CANCELLED = "cancelled"  # the client went away first


class Decision(Struct, frozen=True):
    """Where a request goes, and why.

    `ranked` are the endpoints that came out best, as far as they were scored, the chosen one first. `fallbacks` come
    after it in the destination list; no address occurs twice. `prefill` computes the prompt, and the chosen endpoint
    the answer; None: one does both. No policy makes such a decision yet, and no prompt is predicted at `prefill`.
    """

    request: Request
    ranked: tuple[Scored, ...]
    fallbacks: tuple[EndpointSpec, ...]
    policy: str
    prefill: Scored | None = None

    @property
    def best(self) -> Scored:
        """The chosen endpoint, and what the request costs there."""
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
        """Addresses in order of preference."""
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
