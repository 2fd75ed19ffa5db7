"""The bootstrap document, as one pure function of an `EnvoyConfig`, and the files beside it.

The messages are those of `envoy-data-plane`, so a misspelt field fails here and not in Envoy. What the configuration
promises:

- The picker is asked over ext_proc and its answer is followed: cluster `pods` selects the host named by the
  destination header (then by dynamic metadata), walks the list on retries, and falls back to round robin when there is
  no answer.
- Nothing a client sends can address a host: the first filter removes every destination header before the picker is
  asked.
- The picker may be away: with `fail_open` requests are then spread evenly over the last known endpoints, else they are
  refused. A picker that dies takes nothing with it: another one is asked, and answers that run go on.
- Which endpoints exist is learnt from the picker's EDS server; they stay in use while the picker is away.
- No prompt text is ever logged: the access log has no body, no query string, and no header but the request id; nor have
  spans, but for the name of the client's program.
- Only inference paths of the engines behind it are served; everything else is 404, and the picker is not asked.
- No client holds memory for long or without bound: half-sent requests end after a time, and near the heap limit nothing
  more is taken in.
- Nothing of the admin page but readiness and metrics can be reached from another machine.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import betterproto2
from envoy_data_plane.envoy.config.bootstrap.v3 import Admin, Bootstrap, BootstrapStaticResources
from envoy_data_plane.envoy.config.core import v3 as core_v3
from envoy_data_plane.envoy.config.listener.v3 import Filter, FilterChain, Listener
from envoy_data_plane.envoy.config.route import v3 as route_v3
from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager import v3 as hcm_v3
from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher
from envoy_data_plane.google.protobuf import Any as Packed

from treeline_operator.envoy.clusters import (
    admin_cluster,
    collector_cluster,
    eds_cluster,
    ext_proc_cluster,
    pods_cluster,
)
from treeline_operator.envoy.config import ADMIN_CLUSTER, EnvoyConfig, address
from treeline_operator.envoy.listener import listener
from treeline_operator.envoy.overload import overload_manager, runtime

_PAGES = {"/ready": "/ready", "/metrics": "/stats/prometheus"}
"""Our page → the admin page's. `/ready` is 503 until everything is loaded and once the health check is failed."""


def bootstrap(config: EnvoyConfig) -> dict[str, Any]:
    """The bootstrap as plain JSON types; `json.dump` of it is a file for `envoy --config-path`."""
    listeners = [listener(config)]
    clusters = [pods_cluster(config), ext_proc_cluster(config), eds_cluster(config), *collector_cluster(config)]
    if config.health_port is not None:
        listeners.append(_health_listener(config.listen_host, config.health_port))
        clusters.append(admin_cluster(config))
    # The admin page can stop the process and shows the configuration with its keys: for loopback only.
    admin = None
    if config.admin_port is not None:
        admin = Admin(address=address("127.0.0.1", config.admin_port), ignore_global_conn_limit=True)
    message = Bootstrap(
        node=core_v3.Node(id="treeline", cluster="treeline"),
        admin=admin,
        overload_manager=overload_manager(config),
        layered_runtime=runtime(config),
        static_resources=BootstrapStaticResources(listeners=listeners, clusters=clusters),
    )
    return message.to_dict(casing=betterproto2.Casing.SNAKE)


def bootstrap_json(config: EnvoyConfig) -> str:
    """The bootstrap as indented JSON text."""
    return json.dumps(bootstrap(config), indent=2)


def _health_listener(host: str, port: int) -> Listener:
    """Readiness and metrics for the cluster, and nothing else of the admin page. A graceful drain of the gateway's own
    listener leaves this one open."""
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
    nothing = route_v3.DirectResponseAction(
        status=404, body=core_v3.DataSource(inline_string="GET /ready or /metrics\n")
    )
    routes.append(route_v3.Route(match=route_v3.RouteMatch(prefix="/"), direct_response=nothing))
    manager = hcm_v3.HttpConnectionManager(
        stat_prefix="health",
        route_config=route_v3.RouteConfiguration(
            name="health", virtual_hosts=[route_v3.VirtualHost(name="health", domains=["*"], routes=routes)]
        ),
        http_filters=[hcm_v3.HttpFilter(name="envoy.filters.http.router", typed_config=Packed.pack(Router()))],
        normalize_path=True,
        request_headers_timeout=timedelta(seconds=10),
        request_timeout=timedelta(seconds=10),
        stream_idle_timeout=timedelta(seconds=30),
    )
    chain = FilterChain(
        filters=[Filter(name="envoy.filters.network.http_connection_manager", typed_config=Packed.pack(manager))]
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
