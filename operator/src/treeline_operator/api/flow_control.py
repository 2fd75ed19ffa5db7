"""Owns how a pool says which requests wait in the picker, how long, and how much each client may have."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StrictBool, StrictFloat, StrictInt, StringConstraints
from treeline_wire.headers import CREDENTIALS

from treeline_operator.api.parts import DnsName, Part
from treeline_operator.api.rules import Rule, forbidden

Seconds = Annotated[StrictFloat, Field(gt=0, le=3600)]
"""As long as our own Envoy lets a request wait."""
HeaderName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]*$", max_length=64)]


def _only_enabled(field: str, what: str) -> Rule:
    return forbidden(
        f"!has(self.{field}) || self.enabled",
        f"{field} says {what}, and none does: set enabled, or remove {field}",
        field=f".{field}",
    )


def _only_where_something_waits(field: str) -> Rule:
    return forbidden(
        f"!has(self.{field}) || self.enabled || has(self.holdEmptyPoolSeconds)",
        f"{field} bounds what waits, and nothing does: set enabled or holdEmptyPoolSeconds, or remove {field}",
        field=f".{field}",
    )


class QuotaFileRef(Part):
    """A ConfigMap or Secret of the same namespace with the quotas, in the format of docs/flow-control.md."""

    name: DnsName
    """Name of the object, in the namespace of this one."""
    key: Annotated[str, StringConstraints(pattern=r"^[-._a-zA-Z0-9]+$", max_length=253)] = "quotas.yaml"
    """Key within it."""


class Quotas(Part):
    """Where the quotas of clients are. A change is followed without a restart; what cannot be read changes nothing."""

    RULES = (
        Rule(
            "has(self.configMapRef) != has(self.secretRef)",
            "quotas are in one file: set configMapRef or secretRef, and not both",
        ),
    )

    config_map_ref: QuotaFileRef | None = None
    """In a ConfigMap."""
    secret_ref: QuotaFileRef | None = None
    """In a Secret. The operator never reads it; the picker mounts it."""


class FlowControl(Part):
    """Which requests wait in the picker, how long, and how much each client may have: docs/flow-control.md."""

    RULES = (
        forbidden(
            "!has(self.waitSeconds) || !has(self.endpointRequests)",
            "a pod is full by its predicted work or by its requests: remove waitSeconds or endpointRequests",
            field=".endpointRequests",
        ),
        _only_enabled("waitSeconds", "when a request waits"),
        _only_enabled("endpointRequests", "when a request waits"),
        _only_enabled("ttlSeconds", "how long a request waits for room"),
        _only_where_something_waits("maxRequests"),
        _only_where_something_waits("maxBytes"),
        forbidden(
            "!has(self.fairnessHeader) || self.enabled || has(self.quotas)",
            "nothing asks whose a request is: set enabled or quotas, or remove fairnessHeader",
            field=".fairnessHeader",
        ),
        forbidden(
            f"!has(self.fairnessHeader) || !(self.fairnessHeader in {list(CREDENTIALS)})",
            "this header carries a secret, and a client's name is told in messages and traces: name another",
            field=".fairnessHeader",
        ),
    )

    enabled: StrictBool = False
    """Requests wait in the picker while every pod that may serve them is full: by priority, and within a priority each
    client gets as many tokens as the others that wait. Off: they wait in the pods, in the order in which they came."""
    wait_seconds: Seconds | None = None
    """A pod is full with more than so much work before a request, as the picker predicts. Absent means 1."""
    endpoint_requests: Annotated[StrictInt, Field(ge=1, le=1_000_000)] | None = None
    """A pod is full with so many requests, whatever work they are: instead of waitSeconds."""
    max_requests: Annotated[StrictInt, Field(ge=1, le=1_000_000)] | None = None
    """Requests that may wait for one pool at one priority; more are answered 429. Absent means 5000."""
    max_bytes: Annotated[StrictInt, Field(ge=1, le=1 << 29)] | None = None
    """Bytes of their bodies, counted alike. Absent means 256 MiB."""
    ttl_seconds: Seconds | None = None
    """How long a request waits for room before it is answered 429. Absent means 60."""
    hold_empty_pool_seconds: Seconds | None = None
    """How long a request waits for a pool without a ready pod, as one that was scaled to zero, before it is answered
    503; not only where enabled. Absent: it is answered at once."""
    fairness_header: HeaderName | None = None
    """Request header that says whose a request is, for fairness and quotas. Whoever can send it chooses: have your
    Gateway set it. Not with API keys, by whose names clients are told apart. Absent: trustRequestHeaders decides
    whether x-gateway-inference-fairness-id is believed."""
    quotas: Quotas | None = None
    """Tokens and requests that each client may have; more is answered 429. Clients are told apart as for fairness. Our
    own Envoy then shows responses to the picker, piece by piece: it counts what outputs took."""
