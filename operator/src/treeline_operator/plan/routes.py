"""What Gateway API data planes need of a pool: an upstream InferencePool that mirrors it, and an HTTPRoute to that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from treeline_wire import labels
from treeline_wire import ports as wire

from treeline_operator import names
from treeline_operator.api.pool import InferencePool, ParentRef
from treeline_operator.world import Platform

ROUTE: Final = "gateway.networking.k8s.io/v1/HTTPRoute"
UPSTREAM: Final = "inference.networking.k8s.io/v1/InferencePool"
MODEL_HEADER: Final = "X-Gateway-Model-Name"
"""Set from the request's body by gateways with a body-based router."""


def missing_apis(platform: Platform) -> tuple[str, ...]:
    """What the cluster lacks for a pool with parentRefs, each with what to do."""
    fixes = {
        ROUTE: "the cluster has no Gateway API (gateway.networking.k8s.io/v1 HTTPRoute): install its CRDs",
        UPSTREAM: "the cluster has no Gateway API Inference Extension (inference.networking.k8s.io/v1 InferencePool): "
        "install its CRDs",
    }
    return tuple(fix for api, fix in fixes.items() if api not in platform.apis)


def upstream_pool(pool: InferencePool, failure_mode: str, meta: dict[str, Any]) -> dict[str, Any]:
    """The Inference Extension's InferencePool of our pods, with our picker."""
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": meta,
        "spec": {
            "selector": {"matchLabels": {labels.POOL: pool.name, labels.SERVING: "true"}},
            "targetPorts": [{"number": pool.spec.engine.port}],
            "endpointPickerRef": {
                "group": "",
                "kind": "Service",
                "name": names.epp(pool.spec.gateway.name),
                "port": {"number": wire.EXT_PROC},
                "failureMode": failure_mode,
            },
        },
    }


def http_route(
    pool: InferencePool,
    parents: Sequence[ParentRef],
    hostnames: Sequence[str],
    meta: dict[str, Any],
    *,
    by_model: bool,
) -> dict[str, Any]:
    """The route from the Gateways to the pool.

    Of several pools behind one gateway the oldest takes every request, the others (``by_model``) those for their model.
    """
    match: dict[str, Any] = {"path": {"type": "PathPrefix", "value": "/"}}
    if by_model:
        match["headers"] = [{"type": "Exact", "name": MODEL_HEADER, "value": pool.spec.model.served_name}]
    backend = {
        "group": "inference.networking.k8s.io",
        "kind": "InferencePool",
        "name": names.upstream_pool(pool.name),
    }
    spec: dict[str, Any] = {
        "parentRefs": [p.model_dump(mode="json", by_alias=True, exclude_none=True) for p in parents],
        # An answer takes as long as it takes: no timeout but those of the runtime.
        "rules": [{"matches": [match], "backendRefs": [backend], "timeouts": {"request": "0s"}}],
    }
    if hostnames:
        spec["hostnames"] = list(hostnames)
    return {"apiVersion": "gateway.networking.k8s.io/v1", "kind": "HTTPRoute", "metadata": meta, "spec": spec}
