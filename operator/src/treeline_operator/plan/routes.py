"""Objects for Gateway API: an upstream InferencePool that mirrors a pool, and an HTTPRoute to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from treeline_wire import headers, labels
from treeline_wire import ports as wire
from treeline_wire.paths import INFERENCE, PathRule

from treeline_operator import names
from treeline_operator.api.gateway import ParentRef
from treeline_operator.api.pool import InferencePool
from treeline_operator.plan.objects import manifest

ROUTE: Final = "gateway.networking.k8s.io/v1/HTTPRoute"
UPSTREAM: Final = "inference.networking.k8s.io/v1/InferencePool"
MODEL_HEADER: Final = "X-Gateway-Model-Name"
"""Set from the request's body by gateways with a body-based router."""
_MATCHES: Final = 8
"""Matches in one rule, a number that every version of Gateway API takes; newer ones take 64, and 128 in a route."""


_NO_CLIENT: Final[dict[str, Any]] = {
    "type": "RequestHeaderModifier",
    "requestHeaderModifier": {"remove": [headers.CLIENT, headers.ISOLATION, headers.EDGE]},
}
"""Headers that only our own Envoy may set, because runtimes trust them."""


def upstream_pool(pool: InferencePool, failure_mode: str, meta: dict[str, Any], *, role: str) -> dict[str, Any]:
    """The Inference Extension's InferencePool of our pods, with our picker; of those with a `role` if it is given."""
    picker = {
        "group": "",
        "kind": "Service",
        "name": names.epp(pool.spec.gateway.name),
        "port": {"number": wire.EXT_PROC},
        "failureMode": failure_mode,
    }
    match = {labels.POOL: pool.name, labels.SERVING: "true"} | ({labels.ROLE: role} if role else {})
    spec = {
        "selector": {"matchLabels": match},
        "targetPorts": [{"number": pool.spec.engine.port}],
        "endpointPickerRef": picker,
    }
    return manifest("inference.networking.k8s.io/v1", "InferencePool", meta, spec=spec)


def http_route(
    pool: InferencePool,
    parents: Sequence[ParentRef],
    hostnames: Sequence[str],
    meta: dict[str, Any],
    *,
    by_model: bool,
) -> dict[str, Any]:
    """The route from the Gateways to the pool, for the inference paths of its engine and nothing else.

    Of several pools behind one gateway the oldest takes every request, the others (`by_model`) those for their model.
    """
    matches = list(matches_of(INFERENCE[pool.spec.engine.type], pool.spec.model.served_name if by_model else None))
    backend = {
        "group": "inference.networking.k8s.io",
        "kind": "InferencePool",
        "name": names.upstream_pool(pool.name),
    }
    spec: dict[str, Any] = {
        "parentRefs": [p.model_dump(mode="json", by_alias=True, exclude_none=True) for p in parents],
        "rules": [
            # No timeout for answers but the runtime's.
            {
                "matches": matches[i : i + _MATCHES],
                "filters": [_NO_CLIENT],
                "backendRefs": [backend],
                "timeouts": {"request": "0s"},
            }
            for i in range(0, len(matches), _MATCHES)
        ],
    }
    if hostnames:
        spec["hostnames"] = list(hostnames)
    return manifest("gateway.networking.k8s.io/v1", "HTTPRoute", meta, spec=spec)


def matches_of(rules: Sequence[PathRule], model: str | None = None) -> Iterator[dict[str, Any]]:
    """A match for every path and method; with `model` only for requests that ask for it."""
    headers = [{"type": "Exact", "name": MODEL_HEADER, "value": model}]
    below = {rule.path for rule in rules if rule.below}
    for rule in rules:
        if rule.below:
            continue
        # A prefix stands for the path itself and all that is below it.
        kind = "PathPrefix" if rule.path in below else "Exact"
        for method in rule.methods:
            match: dict[str, Any] = {"path": {"type": kind, "value": rule.path}, "method": method}
            yield match if model is None else {**match, "headers": headers}
