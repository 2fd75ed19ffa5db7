"""The bootstrap document, as one pure function of an `EnvoyConfig`, and the files beside it.

Promises of the configuration:

- The picker is asked over ext_proc and its answer is followed: cluster `pods` selects the host in the destination
  header (then in dynamic metadata), tries the rest of the list on retries, and falls back to round robin without one.
- Clients cannot address a host: the first filter removes every destination header.
- Without a picker, `fail_open` spreads requests over the last known endpoints; otherwise they are refused. When a
  picker dies, another one is asked, and running answers continue.
- Endpoints come from the picker's EDS server and stay in use while the picker is away.
- Prompt text is never logged: the access log has no body, no query string, and no header but the request id. Spans
  add only the name of the client's program.
- Only inference paths of the engines are served; everything else is 404 without asking the picker.
- No client holds memory for long: half-sent requests end after a time, and near the heap limit nothing new is accepted.
- Other machines reach only readiness and metrics of the admin page.
"""

from __future__ import annotations

import json

from treeline_operator.envoy.clusters import (
    admin_cluster,
    collector_cluster,
    console_cluster,
    eds_cluster,
    ext_proc_cluster,
    pods_cluster,
)
from treeline_operator.envoy.config import ADMIN_CLUSTER, EnvoyConfig
from treeline_operator.envoy.listener import listener
from treeline_operator.envoy.messages import Message, address, http_manager, router
from treeline_operator.envoy.overload import overload_manager, runtime

_PAGES = {"/ready": "/ready", "/metrics": "/stats/prometheus"}
"""Our page → the admin page's. `/ready` is 503 until everything is loaded and once the health check is failed."""


def bootstrap(config: EnvoyConfig) -> Message:
    """The bootstrap as plain JSON types; `json.dump` of it is a file for `envoy --config-path`."""
    listeners = [listener(config)]
    clusters = [
        *(pods_cluster(config), ext_proc_cluster(config), eds_cluster(config)),
        *(*console_cluster(config), *collector_cluster(config)),
    ]
    if config.health_port is not None:
        listeners.append(_health_listener(config.listen_host, config.health_port))
        clusters.append(admin_cluster(config))
    document = {
        "node": {"id": "treeline", "cluster": "treeline"},
        "overload_manager": overload_manager(config),
        "layered_runtime": runtime(config),
        "static_resources": {"listeners": listeners, "clusters": clusters},
    }
    if config.admin_port is not None:
        # The admin page can stop the process and shows the configuration with its keys: for loopback only.
        document["admin"] = {**address("127.0.0.1", config.admin_port), "ignore_global_conn_limit": True}
    return document


def bootstrap_json(config: EnvoyConfig) -> str:
    """The bootstrap as JSON text on one line, which takes a millisecond at each plan of a gateway."""
    return json.dumps(bootstrap(config))


def _health_listener(host: str, port: int) -> Message:
    """Readiness and metrics for the cluster, and nothing else of the admin page. A graceful drain of the gateway's own
    listener leaves this one open."""
    get = {"name": ":method", "string_match": {"exact": "GET"}}
    routes: list[Message] = [
        {
            "match": {"path": ours, "headers": [get]},
            "route": {"cluster": ADMIN_CLUSTER, "prefix_rewrite": theirs, "timeout": "10s"},
        }
        for ours, theirs in _PAGES.items()
    ]
    nothing = {"status": 404, "body": {"inline_string": "GET /ready or /metrics\n"}}
    routes.append({"match": {"prefix": "/"}, "direct_response": nothing})
    manager = {
        "stat_prefix": "health",
        "route_config": {
            "name": "health",
            "virtual_hosts": [{"name": "health", "domains": ["*"], "routes": routes}],
        },
        "http_filters": [router()],
        "normalize_path": True,
        "request_headers_timeout": "10s",
        "request_timeout": "10s",
        "stream_idle_timeout": "30s",
    }
    return {
        "name": "health",
        **address(host, port),
        "enable_reuse_port": False,
        "filter_chains": [{"filters": [http_manager(manager)]}],
        # An edge that refuses some requests is still ready for others, and its pages stay reachable.
        "bypass_overload_manager": True,
        "ignore_global_conn_limit": True,
    }
