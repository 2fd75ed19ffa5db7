"""NetworkPolicies of runtimes, pickers and Envoys: everything is denied but the paths that serving needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from treeline_wire import ports

from treeline_operator import names
from treeline_operator.api.gateway import ParentRef, Tracing
from treeline_operator.api.pool import InferencePool
from treeline_operator.plan.edge import HEALTH_PORT, LISTEN_PORT
from treeline_operator.plan.engines import metrics_port
from treeline_operator.plan.gateway_common import Component, GatewayContext
from treeline_operator.plan.objects import Object, manifest, port
from treeline_operator.plan.runtime import selector
from treeline_operator.plan.tokenizers import Tokenizers
from treeline_operator.world import Platform

_NAMESPACE: Final = "kubernetes.io/metadata.name"
ADMITTED: Final = "treeline.dev/gateway-access"
"""Namespaces with this label set to "true" may reach runtimes and pickers. For the namespace of a Gateway's proxies, if
it is not the Gateway's own."""
_NODE_LOCAL_DNS: Final = "169.254.20.10/32"
_DNS: Final = {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}
_EVENT_PORTS: Final = (ports.EVENTS, ports.REPLAY, ports.LOAD)


def pods_policy(
    pool: InferencePool, parents: Sequence[ParentRef], platform: Platform, meta: Object, *, meet: int | None
) -> Object:
    """Policies for the life of the pool. `parents` are the Gateways that send it requests; `meet` says at how many
    ports pods fetch pages from each other, None if they connect at any port: those of a replica, or of both sides with
    `spec.prefill`. Nothing admits traffic to administration, which listens on the pod's loopback.
    """
    gateway, http = pool.spec.gateway.name, [port(pool.spec.engine.port)]
    ingress = [
        {"from": [_pods(gateway, "edge")], "ports": http},
        {"from": [_pods(gateway, "epp")], "ports": http + _event_ports(pool.spec.engine.data_parallel)},
    ]
    metrics = scraped_port(pool, platform)
    if metrics is not None and platform.metrics_from:
        ingress.append({"from": list(platform.metrics_from), "ports": [port(metrics[1])]})
    if parents:
        ingress.append({"from": _proxies(parents, pool.namespace), "ports": http})
    # The ranks of a group choose their ports as they connect, and so do engines that hand prompts over; no policy can
    # name the pods of one group alone.
    own, first = [{"podSelector": {"matchLabels": selector(pool.name)}}], ports.KV_TRANSFER
    pages = [{"ports": [port(first, first + meet - 1)]}] if meet else []
    met = [{}] if meet is None else pages
    ingress += [{"from": own, **at} for at in met]
    dns = {"to": [{"namespaceSelector": {}}, {"ipBlock": {"cidr": _NODE_LOCAL_DNS}}], **_DNS}
    egress = [dns, *({"to": own, **at} for at in met), *_collector(pool.spec.tracing)]
    if pool.spec.engine.media is not None and pool.spec.engine.media.allowed_domains:
        egress.append({"ports": [port(443)]})
    return _policy(meta, {"matchLabels": selector(pool.name)}, ingress=ingress, egress=egress)


def scraped_port(pool: InferencePool, platform: Platform) -> tuple[str, int] | None:
    """Name and number of the port where Prometheus may read the pods' metrics; None if there is none. An engine that is
    not ours serves metrics on its API port, which is opened to Prometheus only if the operator's settings allow it.
    """
    own = metrics_port(pool)
    if own is not None:
        return "metrics", own
    return ("http", pool.spec.engine.port) if platform.scrape_api_ports else None


def download_policy(pool: InferencePool, meta: Object) -> Object:
    """The way out to the model's source; it exists only while some pod has yet to download."""
    return _policy(meta, {"matchLabels": selector(pool.name)}, types=["Egress"], egress=[{"ports": [port(443)]}])


def gateway_policies(context: GatewayContext) -> list[Object]:
    """Policies of picker and Envoy: default deny first, then exceptions."""
    found = [_deny(context), _picker(context)]
    return [*found, _envoy(context)] if context.shared.mode == "standalone" else found


def _deny(context: GatewayContext) -> Object:
    both = {
        "matchLabels": {names.GATEWAY: context.gateway},
        "matchExpressions": [{"key": names.COMPONENT, "operator": "In", "values": ["edge", "epp"]}],
    }
    return _policy(context.meta(f"{context.gateway}-gateway-deny"), both)


def _envoy(context: GatewayContext) -> Object:
    ingress = [
        {"ports": [port(LISTEN_PORT)]},
        # Readiness and metrics: Envoy's own admin page is on its loopback.
        {"from": [_operator(context), *context.platform.metrics_from], "ports": [port(HEALTH_PORT)]},
    ]
    console = [port(ports.PICKER_ADMIN)] if context.shared.edge.console else []
    egress = [
        {"to": [_pods(context.gateway, "epp")], "ports": [port(ports.EXT_PROC), port(ports.EDS), *console]},
        {"to": [_pods(context.gateway, "runtime")], "ports": _serving_ports(context)},
        _DNS,
        *_collector(context.shared.tracing),
    ]
    match = {"matchLabels": context.pods("edge")}
    return _policy(context.meta(names.edge(context.gateway)), match, ingress=ingress, egress=egress)


def _picker(context: GatewayContext) -> Object:
    platform = context.platform
    if context.shared.mode == "standalone":
        callers = [_pods(context.gateway, "edge")]
        console = [port(ports.PICKER_ADMIN)] if context.shared.edge.console else []
    else:
        console = []
        parents = (parent for pool in context.pools for parent in pool.spec.gateway.parent_refs)
        callers = _proxies(parents, context.namespace)
    ingress = [
        {"from": callers, "ports": [port(ports.EXT_PROC), port(ports.EDS), *console]},
        {"from": [_operator(context)], "ports": [port(ports.PICKER_ADMIN)]},
    ]
    peers = {"ports": [{"port": ports.PEERS, "protocol": "UDP"}]}
    ingress.append({"from": [_pods(context.gateway, "epp")], **peers})
    if platform.metrics_from:
        ingress.append({"from": list(platform.metrics_from), "ports": [port(ports.METRICS)]})
    ranks = max(pool.spec.engine.data_parallel for pool in context.pools)
    egress = [
        {"to": [_pods(context.gateway, "runtime")], "ports": _serving_ports(context) + _event_ports(ranks)},
        {"to": [_pods(context.gateway, "epp")], **peers},
        # The API server has no labels; which of its ports counts depends on whether its Service is resolved first.
        {"ports": [port(number) for number in platform.api_server_ports]},
        # To anywhere: a node's own DNS cache has an address that no selector covers.
        _DNS,
    ]
    egress += _collector(context.shared.tracing)
    if Tokenizers.of(context.shared).hub:
        egress.append({"ports": [port(443)]})
    match = {"matchLabels": context.pods("epp")}
    return _policy(context.meta(names.epp(context.gateway)), match, ingress=ingress, egress=egress)


def _policy(meta: Object, match: Object, *, types: Sequence[str] = ("Ingress", "Egress"), **rules: Any) -> Object:
    spec = {"podSelector": match, "policyTypes": list(types), **rules}
    return manifest("networking.k8s.io/v1", "NetworkPolicy", meta, spec=spec)


def _collector(tracing: Tracing | None) -> list[Object]:
    """Egress to the collector, anywhere: a Service's name does not tell its pods' labels."""
    return [] if tracing is None else [{"ports": [port(tracing.collector[1])]}]


def _serving_ports(context: GatewayContext) -> list[Object]:
    return [port(number) for number in sorted({pool.spec.engine.port for pool in context.pools})]


def _event_ports(ranks: int) -> list[Object]:
    """Ports of events, replay and load, for this number of data-parallel ranks."""
    return [port(first, first + ranks - 1) for first in _EVENT_PORTS]


def _pods(gateway: str, component: Component | str) -> Object:
    return {"podSelector": {"matchLabels": {names.GATEWAY: gateway, names.COMPONENT: component}}}


def _proxies(parents: Iterable[ParentRef], home: str) -> list[Object]:
    namespaces = sorted({parent.namespace or home for parent in parents})
    return [*(_namespace(_NAMESPACE, name) for name in namespaces), _namespace(ADMITTED, "true")]


def _operator(context: GatewayContext) -> Object:
    platform = context.platform
    pods = {"podSelector": {"matchLabels": dict(platform.operator_labels)}}
    return {**_namespace(_NAMESPACE, platform.operator_namespace), **pods}


def _namespace(label: str, value: str) -> Object:
    return {"namespaceSelector": {"matchLabels": {label: value}}}
