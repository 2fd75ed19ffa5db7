"""The Envoy bootstrap of Treeline's own data plane, as one pure function of an :class:`EnvoyConfig`.

Used on a laptop (``treeline up``), and in a cluster without Gateway API. The messages are those of
``envoy-data-plane``, so a misspelt field fails here and not in Envoy. What the configuration promises:

- The picker is asked over ext_proc and its answer is followed: cluster ``pods`` selects the host named by the
  destination header (then by dynamic metadata), walks the list on retries, and falls back to round robin when there is
  no answer.
- Nothing a client sends can address a host: the first filter removes every destination header before the picker is
  asked.
- The picker may be away: with ``fail_open`` requests are then spread evenly over the last known endpoints.
- Which endpoints exist is learnt from the picker's EDS server; they stay in use while the picker is away.
- No prompt text is ever logged: the access log has no body, no query string, and no header but the request id.
"""

from __future__ import annotations

import json
from typing import Any

import betterproto2
from envoy_data_plane.envoy.config.bootstrap.v3 import Admin, Bootstrap, BootstrapStaticResources
from envoy_data_plane.envoy.config.core.v3 import Node

from treeline_operator.envoy.clusters import eds_cluster, ext_proc_cluster, pods_cluster
from treeline_operator.envoy.config import EnvoyConfig, Tls, address
from treeline_operator.envoy.listener import listener

__all__ = ["EnvoyConfig", "Tls", "bootstrap", "bootstrap_json", "command"]


def bootstrap(config: EnvoyConfig) -> dict[str, Any]:
    """The bootstrap as plain JSON types; ``json.dump`` of it is a file for ``envoy --config-path``."""
    message = Bootstrap(
        node=Node(id=config.node_id, cluster=config.node_cluster),
        # The admin page can stop the process and shows the configuration with its keys: loopback only.
        admin=Admin(address=address("127.0.0.1", config.admin_port)),
        static_resources=BootstrapStaticResources(
            listeners=[listener(config)],
            clusters=[pods_cluster(config), ext_proc_cluster(config), eds_cluster(config)],
        ),
    )
    return message.to_dict(casing=betterproto2.Casing.SNAKE)


def bootstrap_json(config: EnvoyConfig) -> str:
    """The bootstrap as indented JSON text."""
    return json.dumps(bootstrap(config), indent=2)


def command(
    envoy: str,
    config_path: str,
    *,
    concurrency: int | None = None,
    drain_s: int = 30,
    log_flush_ms: int = 1000,
) -> list[str]:
    """The command line that runs Envoy on a bootstrap file.

    ``drain_s`` bounds a graceful drain: ``POST /drain_listeners?graceful`` on the admin port makes Envoy close idle
    connections over that time, then stop listening; SIGTERM afterwards ends the process. SIGTERM alone ends it at once.
    ``log_flush_ms`` is how long a line of the access log may wait in memory (Envoy's own default is 10 s).
    """
    args = [envoy, "--config-path", config_path, "--disable-hot-restart", "--drain-time-s", str(drain_s)]
    args += ["--log-level", "warning", "--file-flush-interval-msec", str(log_flush_ms)]
    if concurrency is not None:
        args += ["--concurrency", str(concurrency)]
    return args
