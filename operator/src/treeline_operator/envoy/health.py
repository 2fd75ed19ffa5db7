"""The health listener: readiness and metrics for the cluster, and nothing else of Envoy's admin page."""

from __future__ import annotations

from datetime import timedelta

from envoy_data_plane.envoy.config.core.v3 import DataSource
from envoy_data_plane.envoy.config.listener.v3 import Filter, FilterChain, Listener
from envoy_data_plane.envoy.config.route import v3 as route_v3
from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager import v3 as hcm_v3
from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher
from envoy_data_plane.google.protobuf import Any

from treeline_operator.envoy.config import ADMIN_CLUSTER, address

_PAGES = {"/ready": "/ready", "/metrics": "/stats/prometheus"}
"""Our page → the admin page's. `/ready` is 503 until everything is loaded and once the health check is failed."""


def health_listener(host: str, port: int) -> Listener:
    """A listener of its own, which a graceful drain of the inbound one leaves open."""
    routes = [
        route_v3.Route(
            match=route_v3.RouteMatch(
                path=ours,
                headers=[route_v3.HeaderMatcher(name=":method", string_match=StringMatcher(exact="GET"))],
            ),
            route=route_v3.RouteAction(cluster=ADMIN_CLUSTER, prefix_rewrite=theirs, timeout=timedelta(seconds=10)),
        )
        for ours, theirs in _PAGES.items()
    ]
    nothing = route_v3.DirectResponseAction(status=404, body=DataSource(inline_string="GET /ready or /metrics\n"))
    routes.append(route_v3.Route(match=route_v3.RouteMatch(prefix="/"), direct_response=nothing))
    manager = hcm_v3.HttpConnectionManager(
        stat_prefix="health",
        route_config=route_v3.RouteConfiguration(
            name="health", virtual_hosts=[route_v3.VirtualHost(name="health", domains=["*"], routes=routes)]
        ),
        http_filters=[hcm_v3.HttpFilter(name="envoy.filters.http.router", typed_config=Any.pack(Router()))],
        normalize_path=True,
        request_headers_timeout=timedelta(seconds=10),
        request_timeout=timedelta(seconds=10),
        stream_idle_timeout=timedelta(seconds=30),
    )
    chain = FilterChain(
        filters=[Filter(name="envoy.filters.network.http_connection_manager", typed_config=Any.pack(manager))]
    )
    return Listener(
        name="health",
        address=address(host, port),
        enable_reuse_port=False,
        filter_chains=[chain],
        # An edge that refuses some requests is still ready for others, and can still be looked at.
        bypass_overload_manager=True,
        ignore_global_conn_limit=True,
    )
