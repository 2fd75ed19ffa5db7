"""Envoy: the bootstrap of our own data plane, and the launcher that runs it in a pod.

Used by `treeline up`, and in a cluster without Gateway API. The launcher, `python -m treeline_operator.envoy`, runs in
every edge pod, whose image has `wire/` and few packages.
"""

from __future__ import annotations

from treeline_operator.envoy.config import EnvoyConfig, Isolation, Limits, PickerTls, Tls, Tracing
from treeline_operator.envoy.document import bootstrap, bootstrap_json
from treeline_operator.envoy.tls import picker_tls_files, tls_json

__all__ = [
    "EnvoyConfig",
    "Isolation",
    "Limits",
    "PickerTls",
    "Tls",
    "Tracing",
    "bootstrap",
    "bootstrap_json",
    "command",
    "picker_tls_files",
    "tls_json",
]


def command(
    envoy: str,
    config_path: str,
    *,
    concurrency: int | None = None,
    drain_s: int = 30,
    log_flush_ms: int = 1000,
) -> list[str]:
    """The command line that runs Envoy on a bootstrap file.

    `drain_s` bounds a graceful drain: `POST /drain_listeners?graceful` on the admin port makes Envoy close idle
    connections over that time, then stop listening; SIGTERM afterwards ends the process. SIGTERM alone ends it at once.
    `log_flush_ms` is how long a line of the access log may wait in memory (Envoy's own default is 10 s).
    """
    args = [envoy, "--config-path", config_path, "--disable-hot-restart", "--drain-time-s", str(drain_s)]
    args += ["--log-level", "warning", "--file-flush-interval-msec", str(log_flush_ms)]
    if concurrency is not None:
        args += ["--concurrency", str(concurrency)]
    return args
