"""Envoy's messages as plain JSON: the parts that the modules here have in common.

A field that Envoy does not know makes it refuse the whole bootstrap (`envoy --mode validate`, which the tests run).
"""

from __future__ import annotations

import ipaddress
from typing import Any

Message = dict[str, Any]


def seconds(value: float) -> str:
    """A duration, in milliseconds at the finest."""
    return f"{value:.3f}".rstrip("0").rstrip(".") + "s"


def typed(kind: str, fields: Message | None = None) -> Message:
    """What stands where Envoy takes any message: one of `kind`, whose package begins with `envoy.`."""
    return {"@type": f"type.googleapis.com/envoy.{kind}", **(fields or {})}


def extension(name: str, kind: str, fields: Message | None = None) -> Message:
    """An extension by its name, with its settings."""
    return {"name": f"envoy.{name}", "typed_config": typed(kind, fields)}


def http_filter(name: str, kind: str, fields: Message | None = None, **more: Any) -> Message:
    """An HTTP filter; `kind` is its message, without the package that all filters are in."""
    return {**extension(f"filters.http.{name}", f"extensions.filters.http.{kind}", fields), **more}


def http_manager(fields: Message) -> Message:
    """The network filter that speaks HTTP."""
    name = "filters.network.http_connection_manager"
    return extension(name, f"extensions.{name}.v3.HttpConnectionManager", fields)


def router(fields: Message | None = None) -> Message:
    """The last HTTP filter."""
    return http_filter("router", "router.v3.Router", fields)


def previous_hosts(attempts: int = 5) -> Message:
    """Of a retry policy: not to a host that was tried before, as far as so many draws find another."""
    kind = "extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
    return {
        "retry_host_predicate": [extension("retry_host_predicates.previous_hosts", kind)],
        "host_selection_retry_max_attempts": attempts,
    }


def grpc_service(cluster: str, **more: Any) -> Message:
    """A gRPC service at a cluster."""
    return {"envoy_grpc": {"cluster_name": cluster}, **more}


def address(host: str, port: int) -> Message:
    """A TCP address."""
    return {"address": {"socket_address": {"address": host, "port_value": port}}}


def is_ip(host: str) -> bool:
    """Whether it is an address, and no name to be resolved."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def from_file(path: str) -> Message:
    """A source of configuration: a file that Envoy reads again when it is replaced by renaming."""
    return {"path_config_source": {"path": path}, "resource_api_version": "V3"}
