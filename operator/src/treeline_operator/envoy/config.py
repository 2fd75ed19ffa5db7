"""The settings of a data plane, and the names, limits and timeouts that its parts share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from treeline_wire import ports, tracing_env
from treeline_wire.paths import INFERENCE

LISTENER = "gateway"
PODS_CLUSTER = "pods"
EXT_PROC_CLUSTER = "ext_proc"
EDS_CLUSTER = "eds"
ADMIN_CLUSTER = "admin"
COLLECTOR_CLUSTER = "collector"
CONSOLE_CLUSTER = "console"
CERTIFICATE = "certificate"
"""The name under which Envoy finds the listener's certificate in a discovery file."""
HEALTH_NAME = "envoy.service.ext_proc.v3.ExternalProcessor"
"""The name under which the picker's gRPC health service answers for its ext_proc port."""

Isolation = Literal["PerKey", "Shared"]
"""Whether each client has its own cache, or all share one."""
BodyMode = Literal["NONE", "STREAMED", "BUFFERED", "FULL_DUPLEX_STREAMED"]

LONGEST_HOLD_S = 3600
"""The longest time the picker may hold a request (flow control, waking from zero); Envoy's own upper bound."""


@dataclass(frozen=True)
class Tls:
    """The listener's certificate chain and private key, as PEM files that Envoy reads.

    With `discovery_file` Envoy reads them through that file (its text is `tls_json`) and reloads them when they are
    replaced; without it they are read once.
    """

    certificate_file: str
    key_file: str
    discovery_file: str | None = None


@dataclass(frozen=True)
class PickerTls:
    """Mutual TLS towards the picker: `folder` has `tls.crt`, `tls.key` and `ca.crt`, the picker's certificate
    must be valid for `server_name`, and `discovery_dir` has the files of `picker_tls_files`."""

    folder: str
    server_name: str
    discovery_dir: str


@dataclass(frozen=True)
class Limits:
    """Limits of clients at the edge.

    `headers_timeout_s` and `body_timeout_s` bound the arrival of a request's headers and of the whole request; answers
    are not limited. `idle_timeout_s` bounds a connection without requests (longer than that of a load balancer in
    front, or requests race with the close). `connections` counts all clients' connections, `streams_per_connection` the
    concurrent requests of an HTTP/2 connection. `client_requests_per_s` bounds the rate of each client; `None` does
    not. `heap_bytes` is the memory for everything; near it new requests are refused, and arriving ones are ended.
    """

    headers_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    idle_timeout_s: float = 620.0
    connections: int = 10_000
    streams_per_connection: int = 128
    client_requests_per_s: int | None = None
    heap_bytes: int = 768 * 1024 * 1024


@dataclass(frozen=True)
class Tracing:
    """A collector of OpenTelemetry's traces, which speaks OTLP over gRPC without TLS; `ratio` of the requests that come
    without a trace begin one."""

    host: str
    port: int = tracing_env.PORT
    ratio: float = tracing_env.RATIO


@dataclass(frozen=True)
class EnvoyConfig:
    """The settings of a data plane. The defaults are a loopback listener in front of a picker on this machine.

    `body_limit` is in bytes; larger request bodies get 413. `api_keys` maps a client's name to its key; empty means
    open. `api_keys_file` names a file that Envoy watches instead, so that the bootstrap has no keys and they can change
    (see `keys`). `access_log` is a path such as `/dev/stdout`; `None` means none. `engines` are the types of the
    engines behind the listener, which determine the inference paths that clients can reach (see `treeline_wire.paths`).
    `admin_port` is on loopback, where pages in a browser reach it too; `None` means no admin page. `console_port` is
    the picker's admin port, where it serves the console: then `/` leads to it, and from a listener on loopback also to
    its private data. `health_port` serves only `/ready` and `/metrics`; `None` means no such port.
    """

    listen_host: str = "127.0.0.1"
    listen_port: int = ports.GATEWAY
    admin_port: int | None = None
    epp_host: str = "127.0.0.1"
    ext_proc_port: int = ports.EXT_PROC
    eds_port: int = ports.EDS
    console_port: int | None = None
    engines: tuple[str, ...] = ("treeline",)
    body_limit: int = 32 * 1024 * 1024
    health_port: int | None = None
    limits: Limits = Limits()
    api_keys: Mapping[str, str] | None = None
    api_keys_file: str | None = None
    isolation: Isolation = "PerKey"
    """Means something only where there are API keys."""
    tls: Tls | None = None
    picker_tls: PickerTls | None = None
    expose_cached_tokens: bool = False
    add_endpoint_header: bool = False
    fail_open: bool = True
    request_body_mode: BodyMode = "BUFFERED"
    response_body_mode: BodyMode = "NONE"
    access_log: str | None = "/dev/stdout"
    tracing: Tracing | None = None
    """The collector of spans; None means no tracing."""
    message_timeout_s: float = 1.0
    connect_timeout_s: float = 1.0
    upstream_idle_timeout_s: float = 4.0
    """Shorter than the 5 s after which common Python servers close an idle connection, so that a request never races
    with that close."""

    @property
    def knows_clients(self) -> bool:
        """By their API keys."""
        return bool(self.api_keys or self.api_keys_file)

    def __post_init__(self) -> None:
        if self.request_body_mode == "FULL_DUPLEX_STREAMED" and self.fail_open:
            raise ValueError("fail_open does not work with FULL_DUPLEX_STREAMED bodies: Envoy answers 500 instead")
        if self.body_limit < 1024:
            raise ValueError("body_limit is in bytes and must be at least 1024")
        if self.api_keys and self.api_keys_file:
            raise ValueError("give api_keys or api_keys_file, not both")
        if self.health_port is not None and not self.admin_port:
            raise ValueError("health_port shows two pages of the admin port: give admin_port a number too")
        if not self.engines or not INFERENCE.keys() >= set(self.engines):
            raise ValueError(f"engines must be some of {', '.join(INFERENCE)}; got {self.engines}")
        for client, key in (self.api_keys or {}).items():
            if not key.strip() or not client.strip():
                raise ValueError("an API key and its client's name must not be empty")
