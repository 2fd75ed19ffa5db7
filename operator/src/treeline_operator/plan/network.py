"""Who may reach a pool's pods and what they may reach: nobody and nothing, but for the paths that serving needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from treeline_wire import ports as wire

from treeline_operator import names
from treeline_operator.api.pool import InferencePool, ParentRef
from treeline_operator.plan.runtime import selector

NAMESPACE: Final = "kubernetes.io/metadata.name"
ADMITTED: Final = "treeline.dev/gateway-access"
"""Namespaces with this label set to "true" may reach the pods: those of a gateway's proxies, if they are elsewhere."""
_NODE_LOCAL_DNS: Final = "169.254.20.10/32"


def pods_policy(pool: InferencePool, parents: Sequence[ParentRef], meta: dict[str, Any]) -> dict[str, Any]:
    """What holds for as long as the pool is there. ``parents`` are the Gateways that send requests to it."""
    gateway = pool.spec.gateway.name
    ranks = pool.spec.engine.data_parallel
    picker = [
        _port(pool.spec.engine.port),
        *(_port(base, base + ranks - 1) for base in (wire.EVENTS, wire.REPLAY, wire.LOAD)),
    ]
    http = [_port(pool.spec.engine.port)]
    ingress = [
        {"from": [_component(gateway, "edge")], "ports": http},
        {"from": [_component(gateway, "epp")], "ports": picker},
        {"from": [_prometheus()], "ports": http},
    ]
    if parents:
        namespaces = sorted({parent.namespace or pool.namespace for parent in parents})
        peers = [{"namespaceSelector": {"matchLabels": {NAMESPACE: namespace}}} for namespace in namespaces]
        peers.append({"namespaceSelector": {"matchLabels": {ADMITTED: "true"}}})
        ingress.append({"from": peers, "ports": http})
    return _policy(pool, meta, ["Ingress", "Egress"], ingress=ingress, egress=[_dns()])


def download_policy(pool: InferencePool, meta: dict[str, Any]) -> dict[str, Any]:
    """The way out to the model's source; it exists only while some pod has yet to download."""
    return _policy(pool, meta, ["Egress"], egress=[{"ports": [_port(443)]}])


def _policy(pool: InferencePool, meta: dict[str, Any], types: list[str], **rules: Any) -> dict[str, Any]:
    spec = {"podSelector": {"matchLabels": selector(pool.name)}, "policyTypes": types, **rules}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": meta, "spec": spec}


def _component(gateway: str, component: str) -> dict[str, Any]:
    return {"podSelector": {"matchLabels": {names.GATEWAY: gateway, names.COMPONENT: component}}}


def _prometheus() -> dict[str, Any]:
    return {
        "namespaceSelector": {},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}},
    }


def _dns() -> dict[str, Any]:
    to = [{"namespaceSelector": {}}, {"ipBlock": {"cidr": _NODE_LOCAL_DNS}}]
    return {"to": to, "ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}


def _port(first: int, last: int | None = None) -> dict[str, Any]:
    port: dict[str, Any] = {"port": first, "protocol": "TCP"}
    return port if last is None or last == first else {**port, "endPort": last}
