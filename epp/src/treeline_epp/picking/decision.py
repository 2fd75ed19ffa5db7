"""The picker's decisions, how they end, and the errors without one."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from treeline_epp.endpoints.reservations import Reservation
from treeline_epp.endpoints.spec import EndpointSpec, unfit
from treeline_epp.endpoints.transfer import Role
from treeline_epp.index.pods import Match, Pod
from treeline_epp.picking.endpoint import AuditResult, Endpoint
from treeline_epp.picking.pairs import Apart
from treeline_epp.picking.pulls import Pull
from treeline_epp.picking.request import Request
from treeline_epp.picking.score import Scored

if TYPE_CHECKING:
    from treeline_epp.index.index import Index


FORMS = ("whole", "apart", "pull")


@dataclass(eq=False, slots=True)
class Part:
    """The part of a request at one endpoint: its reservation there, and the prediction that `pod`, one of its ranks,
    will hold the prompt; `predicted_until` names that, None without one. `queued_tokens` were before it. If the picker
    asks the endpoint itself, `cancel` breaks that off, and the end of that ends the part.
    """

    endpoint: Endpoint
    pod: Pod
    reservation: Reservation
    queued_tokens: int
    predicted_until: float | None = None
    cancel: Callable[[], object] | None = None


@dataclass(eq=False, slots=True)
class Lease:
    """A request with a destination, until its response has begun. The picker opens leases (`Picker.reserve`) and closes
    them (`Picker.close`): its parts last as long. `answer` is that of the endpoint that answers, `prefill` that of the
    one that computes the prompt, if it is another, until it has (`Parts.prefilled`).

    `added` are request headers to send to the endpoint that answers; those with None are removed. `members` are members
    of the body to set for it.
    """

    decision: Decision
    answer: Part
    opened_at: float
    prefill: Part | None = None
    closed: bool = False
    added: tuple[tuple[str, str | None], ...] = ()
    members: Mapping[str, Any] = field(default_factory=dict)

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint that answers."""
        return self.answer.endpoint

    @property
    def destination(self) -> str:
        """The destination list, best first, in the form of header and metadata."""
        return ",".join(self.decision.destinations)

    def audit(self, index: Index, cached_tokens: int, now: float) -> None:
        """Compare the endpoint's reported hit with the index, and act on a difference."""
        endpoint, request = self.endpoint, self.decision.request
        pod, expected = endpoint.pod, self.decision.best.candidate
        if request.key is None or not pod.precise or not pod.bit or len(endpoint.pods) > 1:
            return
        if request.key_tokens_estimate is not None:  # nothing was predicted beyond the key
            cached_tokens = min(cached_tokens, expected.cached_tokens)
        end = expected.hit.end
        prefix = zlib.crc32(request.key[max(0, end - 64) : end] or request.key[:64])
        result = endpoint.audit.observe(
            expected.hit.tokens, expected.cached_tokens, cached_tokens, pod.block_size, prefix, now
        )
        if result is AuditResult.REBUILD:
            index.request_rebuild(pod)
        elif result is AuditResult.CAP_HIT:
            index.cap_hit(pod, request.namespace_at(endpoint.spec), request.key, cached_tokens, now)


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
    list; no address occurs twice. `apart` compares computing the prompt at another endpoint, `pull` getting a part of
    its cache from another one; None: there was none, or too little to win.
    """

    request: Request
    ranked: tuple[Scored, ...]
    fallbacks: tuple[EndpointSpec, ...]
    policy: str
    apart: Apart | None = None
    pull: Pull | None = None

    @property
    def form(self) -> str:
        """The form of the request that was chosen: one of FORMS."""
        if self.prefill is not None:
            return "apart"
        return "pull" if self.pull is not None and self.pull.chosen else "whole"

    @property
    def seconds(self) -> dict[str, dict[str, float]]:
        """The terms of the forms that were compared, for explanations; empty if there was one only."""
        forms = {} if self.pull is None else {"whole": self.pull.whole, "pull": self.pull.pull}
        forms |= {} if self.apart is None else {"whole": self.apart.whole, "apart": self.apart.apart}
        return {form: {name: round(value, 6) for name, value in terms.items()} for form, terms in forms.items()}

    @property
    def source(self) -> EndpointSpec | None:
        """The endpoint that computes the prompt, or gives its pages, if another one than the chosen one does."""
        if self.prefill is not None:
            return self.prefill.candidate.spec
        return self.pull.source if self.pull is not None and self.pull.chosen else None

    @property
    def prefill(self) -> Scored | None:
        """The endpoint that computes the prompt, if that is not the chosen one, and the prompt's cost there."""
        return self.apart.prefill if self.apart is not None and self.apart.chosen else None

    @property
    def ttft_s(self) -> float:
        """The predicted seconds to the first token."""
        predicted = {"apart": self.apart, "pull": self.pull}.get(self.form)
        return self.best.ttft_s if predicted is None else predicted.ttft_s

    def fits(self, spec: EndpointSpec) -> bool:
        """Return whether another endpoint, too, can answer this very request."""
        if (prefill := self.prefill) is None:
            return spec.alone
        alike = spec.role is Role.DECODE and spec.protocol is self.endpoint.protocol
        return alike and not unfit(prefill.candidate.spec, spec)

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
            "form": self.form,
            "source_endpoint": None if self.source is None else self.source.name,
            "forms": self.seconds or None,
            "predicted_ttft_s": round(self.ttft_s, 6),
            "cached_tokens": self.best.candidate.cached_tokens,
            "uncached_tokens": self.best.candidate.uncached_tokens,
            "terms": {name: {term: round(v, 6) for term, v in terms.items()} for name, terms in self.terms.items()},
        }
