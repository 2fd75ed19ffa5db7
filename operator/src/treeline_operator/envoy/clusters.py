"""The clusters: the engines, and the picker's two ports."""

from __future__ import annotations

from typing import Final

from treeline_wire import headers

from treeline_operator.envoy.config import (
    ADMIN_CLUSTER,
    COLLECTOR_CLUSTER,
    CONSOLE_CLUSTER,
    EDS_CLUSTER,
    EXT_PROC_CLUSTER,
    HEALTH_NAME,
    PODS_CLUSTER,
    EnvoyConfig,
)
from treeline_operator.envoy.messages import Message, address, extension, is_ip, seconds, typed
from treeline_operator.envoy.tls import to_picker

_MAX_CONCURRENT: Final = 65_536
"""A stream of ext_proc and a request of the pods may last for a whole generation; Envoy's default of 1024 would fail
the next one."""
_RESETS_WAITING: Final = 8192
"""Frames that wait until a picker reads on; with more Envoy ends the connection that all clients share. A request that
a client gives up leaves its reset (a control frame) and up to 60 KiB of headers: half a gigabyte of them at most, where
Envoy's own 1,000 resets are sent within a second."""

_CONSOLE_AT_ONCE: Final = 4
_CONSOLE_WAITING: Final = 64

_BUSY: Final[Message] = {
    "circuit_breakers": {
        "thresholds": [
            dict.fromkeys(("max_connections", "max_pending_requests", "max_requests", "max_retries"), _MAX_CONCURRENT)
        ]
    },
    "common_lb_config": {
        # Never spread requests over hosts known to be bad or draining, even if most are.
        "healthy_panic_threshold": {"value": 0},
        # Workers hear of a changed health at once. By default changes are merged for a second, so that a picker that is
        # back stays unused for that long, and a draining endpoint used.
        "update_merge_window": "0s",
    },
}
"""Common settings of the clusters of engines and picker."""


def pods_cluster(config: EnvoyConfig) -> Message:
    """The engines: known by EDS, chosen by the picker's word, else in turns."""

    def key(name: str) -> Message:
        return {"key": headers.LB, "path": [{"key": name}]}

    override = {
        "override_host_sources": [{"header": headers.DESTINATION}, {"metadata": key(headers.DESTINATION)}],
        # So the picker sees with the response headers which host served.
        "selected_host_key": key(headers.SERVED),
        "fallback_policy": _policy("round_robin", "RoundRobin"),
    }
    # How soon the stream is opened again after the picker was away; Envoy's own bounds are 0.5 s to 30 s.
    retry = {"retry_back_off": {"base_interval": "0.1s", "max_interval": "1s"}}
    source = {
        "api_type": "GRPC",
        "transport_api_version": "V3",
        "grpc_services": [{"envoy_grpc": {"cluster_name": EDS_CLUSTER, "retry_policy": retry}}],
        "set_node_on_first_message_only": True,
    }
    eds = {
        "api_config_source": source,
        "resource_api_version": "V3",
        # How long the listener waits for endpoints at start, should the picker be away.
        "initial_fetch_timeout": "5s",
    }
    return {
        "name": PODS_CLUSTER,
        "type": "EDS",
        "eds_cluster_config": {"eds_config": eds, "service_name": PODS_CLUSTER},
        "connect_timeout": seconds(config.connect_timeout_s),
        "load_balancing_policy": _policy("override_host", "OverrideHost", override),
        **_BUSY,
        **_http(
            {"http_protocol_options": {}},
            common_http_protocol_options={"idle_timeout": seconds(config.upstream_idle_timeout_s)},
        ),
    }


def ext_proc_cluster(config: EnvoyConfig) -> Message:
    """The picker's ext_proc port; its health is asked on the port that also serves EDS."""
    # With one host and no panic routing an unhealthy picker fails at once, which is what lets fail-open act at once.
    check = {
        "timeout": "1s",
        "interval": "1s",
        "no_traffic_interval": "1s",
        # A picker that comes back is asked again at once.
        "unhealthy_interval": "0.2s",
        "unhealthy_threshold": 2,
        "healthy_threshold": 1,
        "grpc_health_check": {"service_name": HEALTH_NAME},
    }
    return {**_picker_cluster(EXT_PROC_CLUSTER, config, config.ext_proc_port), "health_checks": [check]}


def eds_cluster(config: EnvoyConfig) -> Message:
    """The picker's EDS port."""
    return _picker_cluster(EDS_CLUSTER, config, config.eds_port)


def admin_cluster(config: EnvoyConfig) -> Message:
    """Envoy's own admin page, for the health listener."""
    assert config.admin_port is not None  # EnvoyConfig sees to it
    return _one_host(ADMIN_CLUSTER, "127.0.0.1", config.admin_port, connect_timeout_s=0.25)


def console_cluster(config: EnvoyConfig) -> list[Message]:
    """The picker's admin port, if the console is shown. Its pages are few and small, so a client with thousands of
    requests waits in Envoy and does not load the picker."""
    if config.console_port is None:
        return []
    cluster = _one_host(CONSOLE_CLUSTER, config.epp_host, config.console_port, connect_timeout_s=1.0)
    bounds = {"max_connections": _CONSOLE_AT_ONCE, "max_pending_requests": _CONSOLE_WAITING}
    return [{**cluster, "circuit_breakers": {"thresholds": [bounds]}}]


def collector_cluster(config: EnvoyConfig) -> list[Message]:
    """The collector of spans, if any: OTLP over plain-text gRPC."""
    asked = config.tracing
    if asked is None:
        return []
    cluster = _one_host(COLLECTOR_CLUSTER, asked.host, asked.port, connect_timeout_s=config.connect_timeout_s)
    # `localhost` is two addresses, and it may have one.
    return [{**cluster, "dns_lookup_family": "ALL", **_http2()}]


def _picker_cluster(name: str, config: EnvoyConfig, port: int) -> Message:
    """An HTTP/2 cluster with one address, a port of the picker; its health is asked on the EDS port."""
    health = {"health_check_config": {"port_value": config.eds_port}}
    cluster = _one_host(name, config.epp_host, port, connect_timeout_s=0.25, endpoint=health)
    return {**cluster, **_BUSY, **to_picker(config.picker_tls), **_http2()}


def _one_host(name: str, host: str, port: int, *, connect_timeout_s: float, endpoint: Message | None = None) -> Message:
    lb_endpoint = {"endpoint": {**address(host, port), **(endpoint or {})}}
    return {
        "name": name,
        "type": "STATIC" if is_ip(host) else "STRICT_DNS",
        "connect_timeout": seconds(connect_timeout_s),
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [lb_endpoint]}]},
    }


def _policy(name: str, message: str, fields: Message | None = None) -> Message:
    found = extension(
        f"load_balancing_policies.{name}", f"extensions.load_balancing_policies.{name}.v3.{message}", fields
    )
    return {"policies": [{"typed_extension_config": found}]}


def _http2() -> Message:
    options = {"max_outbound_control_frames": _RESETS_WAITING, "max_outbound_frames": _MAX_CONCURRENT}
    return _http({"http2_protocol_options": options})


def _http(explicit: Message, **more: Message) -> Message:
    kind = "extensions.upstreams.http.v3.HttpProtocolOptions"
    options = typed(kind, {"explicit_http_config": explicit, **more})
    return {"typed_extension_protocol_options": {f"envoy.{kind}": options}}
