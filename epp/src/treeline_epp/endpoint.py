"""The picker's vocabulary: what an endpoint is, what is asked, what is decided, and the two ways to say no."""

import ipaddress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from treeline_epp.index import NO_HIT, Hit

if TYPE_CHECKING:
    from treeline_epp.policy import Scored


class PickError(Exception):
    """No destination can be given. `status` is the HTTP status for the client, `reason` the value for
    `x-llm-d-request-dropped-reason` and for metrics."""

    status = 500
    reason = "internal"


class NoEndpoints(PickError):
    """No endpoint is ready for this request: none known, none ready, or the subset leaves none. 503."""

    status = 503
    reason = "rejected-no-endpoints"


class Saturated(PickError):
    """Endpoints are ready, but the queue of each is too long for a request that may be shed. 429; `retry_after_s` is a
    guess from the queues."""

    status = 429
    reason = "rejected-saturated"

    def __init__(self, message: str, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class Outcome(StrEnum):
    """How a lease ends. The values are metric labels."""

    HEADERS = "headers"  # the endpoint answered: its prefill is done
    ERROR = "error"  # the endpoint failed, or answered with an error
    OVERLOADED = "overloaded"  # 503 with x-treeline-overloaded: it refused for want of room
    CANCELLED = "cancelled"  # the client went away first


@dataclass(frozen=True, slots=True)
class EndpointSpec:
    """One endpoint as discovery knows it.

    `address` is `ip:port` of its HTTP server, IPv6 in brackets. `models` are the names that it serves, empty for any.
    `uid` changes when the process behind the name does (pod UID and restart count). `ready` and `draining` are what
    discovery says besides the engine itself. `vouched`: discovery's word is enough where the engine has no probes.
    """

    name: str
    address: str
    pool: str = "default"
    models: tuple[str, ...] = ()
    uid: str = ""
    ready: bool = True
    draining: bool = False
    vouched: bool = False

    @property
    def identity(self) -> tuple[str, str, str, str, bool]:
        """What makes it this endpoint and no other; the rest may change while it lives."""
        return (self.name, self.address, self.pool, self.uid, self.vouched)


@dataclass(frozen=True, slots=True)
class PickRequest:
    """What the picker needs to know of a request.

    `key` is its prefix key (`treeline_wire.keys`), None if it has none (no tokenizer, no text): then only load counts.
    `prompt_tokens_estimate` counts the whole prompt. `max_output_tokens` is the longest output that the request allows,
    None where it does not say. `subset` limits the choice to these addresses: `ip:port`, or a bare IP for all its
    ports. `pool` limits it to one pool. `sheddable`: refuse it rather than let it queue for long.
    """

    request_id: str
    model: str | None = None
    namespace: str | None = None
    key: bytes | None = None
    prompt_tokens_estimate: int = 0
    max_output_tokens: int | None = None
    subset: frozenset[str] | None = None
    pool: str | None = None
    sheddable: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes, and why.

    `fallbacks` come after `endpoint` in the destination list; no address occurs twice. `terms` explains the choice:
    seconds end in `_s`, tokens in `_tokens`; `cost_s` is what was compared. `hit` is what the index knew of the prompt
    at the endpoint; `cached_tokens` adds what is only predicted.
    """

    request: PickRequest
    endpoint: EndpointSpec
    fallbacks: tuple[EndpointSpec, ...] = ()
    predicted_ttft_s: float = 0.0
    predicted_prefill_s: float = 0.0
    cached_tokens: int = 0
    uncached_tokens: int = 0
    hit: Hit = NO_HIT
    policy: str = ""
    ranked: "tuple[Scored, ...]" = ()

    @property
    def terms(self) -> dict[str, dict[str, float]]:
        """Endpoint name → term → value; the chosen endpoint first. Made when asked for."""
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
            "endpoint": self.endpoint.name,
            "fallbacks": [spec.name for spec in self.fallbacks],
            "policy": self.policy,
            "predicted_ttft_s": round(self.predicted_ttft_s, 6),
            "cached_tokens": self.cached_tokens,
            "uncached_tokens": self.uncached_tokens,
            "terms": {
                name: {term: round(v, 6) for term, v in terms.items()} for name, terms in self.terms.items()
            },
        }


def normal_ip(text: str) -> str | None:
    """The canonical spelling of an IP address, brackets removed; None if it is none (a host name, for example)."""
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None


def split_address(address: str) -> tuple[str, str]:
    """Split `ip:port`, `[ip]:port`, a bare IP (v6 with or without brackets) or `name:port` into host and port.

    The port is "" where there is none. IPs are in canonical spelling, so that `[0:0::1]:80` equals `[::1]:80`.
    """
    address = address.strip()
    bare = normal_ip(address)
    if bare is not None:
        return bare, ""
    host, _, port = address.rpartition(":")
    if not host:
        return address, ""
    return normal_ip(host) or host, port
