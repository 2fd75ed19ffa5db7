"""The NetworkPolicies of picker and Envoy: everything is denied but the paths that requests, events and probes take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from treeline_wire import ports

from treeline_operator import names
from treeline_operator.plan.anchored import Component, Ground
from treeline_operator.plan.edge import HEALTH_PORT, LISTEN_PORT

NAMESPACE_NAME: Final = "kubernetes.io/metadata.name"
ADMITTED: Final = "treeline.dev/gateway-access"
"""A namespace with this label and the value ``true`` may ask the pickers, where a Gateway's proxies do not run in the
Gateway's own namespace."""
_METRICS_READERS: Final = {"app.kubernetes.io/name": "prometheus"}
_DNS: Final = {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}
"""To anywhere: a node's own DNS cache has an address that no selector covers."""


def policies(ground: Ground) -> list[dict[str, Any]]:
    """Default deny first, then what is allowed."""
    standalone = ground.shared.mode == "standalone"
    found = [_deny(ground), _picker(ground)]
    return [*found, _envoy(ground)] if standalone else found


def _deny(ground: Ground) -> dict[str, Any]:
    both = {
        "matchLabels": {names.GATEWAY: ground.gateway},
        "matchExpressions": [{"key": names.COMPONENT, "operator": "In", "values": ["edge", "epp"]}],
    }
    return _policy(ground, f"{ground.gateway}-gateway-deny", both, [], [])


def _envoy(ground: Ground) -> dict[str, Any]:
    ingress = [
        {"ports": _tcp(LISTEN_PORT)},
        {"from": [_operator(ground), _metrics_readers()], "ports": _tcp(HEALTH_PORT)},
    ]
    egress = [
        {"to": [_pods(ground, "epp")], "ports": _tcp(ports.EXT_PROC, ports.EDS)},
        {"to": [_runtimes(ground)], "ports": _tcp(*_serving_ports(ground))},
        _DNS,
    ]
    return _policy(ground, names.edge(ground.gateway), _selector(ground, "edge"), ingress, egress)


def _picker(ground: Ground) -> dict[str, Any]:
    if ground.shared.mode == "standalone":
        callers = [_pods(ground, "edge")]
    else:
        callers = [_namespace({NAMESPACE_NAME: name}) for name in _gateway_namespaces(ground)]
        callers.append(_namespace({ADMITTED: "true"}))
    ingress = [
        {"from": callers, "ports": _tcp(ports.EXT_PROC, ports.EDS)},
        {"from": [_operator(ground), _metrics_readers()], "ports": _tcp(ports.METRICS)},
    ]
    egress = [
        {"to": [_runtimes(ground)], "ports": [*_tcp(*_serving_ports(ground)), *_event_ports(ground)]},
        # The API server has no labels; which of its ports counts depends on whether its Service is resolved first.
        {"ports": _tcp(*ground.platform.api_server_ports)},
        _DNS,
    ]
    return _policy(ground, names.epp(ground.gateway), _selector(ground, "epp"), ingress, egress)


def _policy(
    ground: Ground,
    name: str,
    selector: dict[str, Any],
    ingress: Sequence[dict[str, Any]],
    egress: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    rules = {name: list(found) for name, found in (("ingress", ingress), ("egress", egress)) if found}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": ground.meta(name),
        "spec": {"podSelector": selector, "policyTypes": ["Ingress", "Egress"], **rules},
    }


def _serving_ports(ground: Ground) -> list[int]:
    return sorted({pool.spec.engine.port for pool in ground.pools})


def _event_ports(ground: Ground) -> list[dict[str, Any]]:
    """Events, replay and load, of as many data-parallel ranks as any pool has."""
    ranks = max(pool.spec.engine.data_parallel for pool in ground.pools)
    found = _tcp(ports.EVENTS, ports.REPLAY, ports.LOAD)
    return [{**port, "endPort": port["port"] + ranks - 1} for port in found] if ranks > 1 else found


def _gateway_namespaces(ground: Ground) -> list[str]:
    parents = (parent for pool in ground.pools for parent in pool.spec.gateway.parent_refs)
    return sorted({parent.namespace or ground.namespace for parent in parents})


def _tcp(*numbers: int) -> list[dict[str, Any]]:
    return [{"port": number, "protocol": "TCP"} for number in numbers]


def _selector(ground: Ground, component: Component) -> dict[str, Any]:
    return {"matchLabels": ground.pods(component)}


def _pods(ground: Ground, component: Component) -> dict[str, Any]:
    return {"podSelector": _selector(ground, component)}


def _runtimes(ground: Ground) -> dict[str, Any]:
    labels = {names.GATEWAY: ground.gateway, names.COMPONENT: "runtime"}
    return {"podSelector": {"matchLabels": labels}}


def _operator(ground: Ground) -> dict[str, Any]:
    platform = ground.platform
    return {
        **_namespace({NAMESPACE_NAME: platform.operator_namespace}),
        "podSelector": {"matchLabels": dict(platform.operator_labels)},
    }


def _metrics_readers() -> dict[str, Any]:
    """Prometheus, in whichever namespace it is: the pages have numbers only."""
    return {"namespaceSelector": {}, "podSelector": {"matchLabels": dict(_METRICS_READERS)}}


def _namespace(labels: dict[str, str]) -> dict[str, Any]:
    return {"namespaceSelector": {"matchLabels": labels}}
