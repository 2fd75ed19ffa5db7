"""Bounds of the edge on memory, connections, time and each client.

A request's body is buffered whole, because the picker reads it before it chooses. So a stalled body ends after the body
timeout, and the heap limit bounds all bodies together: near it new requests are refused, and arriving ones are ended.
"""

from __future__ import annotations

from typing import Any, Final

from treeline_operator.envoy import keys
from treeline_operator.envoy.config import LISTENER, EnvoyConfig
from treeline_operator.envoy.messages import Message, expression, extension, http_filter, reply, seconds, typed

BUFFER_BYTES: Final = 32 * 1024
"""Buffered bytes of a connection in each direction. Bodies for the picker have their own bound."""
_HEAP: Final = "envoy.resource_monitors.fixed_heap"
_CONNECTIONS: Final = "envoy.resource_monitors.global_downstream_max_connections"
_TRACKED_STREAM: Final = 20
"""Streams with at least two to this power bytes in buffers can be found and ended."""
_STREAM_WINDOW: Final = 256 * 1024
_CONNECTION_WINDOW: Final = 1024 * 1024
_REDUCED: Final = typed(
    "config.overload.v3.ScaleTimersOverloadActionConfig",
    {
        "timer_scale_factors": [
            {"timer": "HTTP_DOWNSTREAM_CONNECTION_IDLE", "min_timeout": "2s"},
            # A stream is idle when its body stops half way, when its client does not read it, and also while it waits
            # for its first token. Some of the latter are lost; without this, every new request would be.
            {"timer": "HTTP_DOWNSTREAM_STREAM_IDLE", "min_timeout": "10s"},
        ]
    },
)
"""Limits of a connection without a request, and of a silent request, while memory is short."""
_CLIENTS: Final = 10_000
"""The most clients whose rates are remembered."""
RATE_FILTER: Final = "envoy.filters.http.local_ratelimit"
_ALWAYS: Final[Message] = {"default_value": {"numerator": 100, "denominator": "HUNDRED"}}
_RATE: Final = "local_ratelimit.v3.LocalRateLimit"
_CONSOLE_PER_S: Final = 100
"""Requests of all clients together. A page has a dozen files, and a picker needs half a millisecond for each."""


def overload_manager(config: EnvoyConfig) -> Message:
    """From 75 % of the heap limit on idle connections and silent requests are ended sooner, and from 85 % on after
    seconds; then HTTP/2 streams with large bodies are reset, the largest first; from 95 % on new requests are answered
    503, and HTTP/1.1 requests that are still arriving too. From 75 % of the connections on those without a request are
    ended sooner, and soon once no more are accepted."""
    connections = {"max_active_downstream_connections": 2 * config.limits.connections}
    return {
        "refresh_interval": "0.1s",
        "resource_monitors": [
            _monitor("fixed_heap", "fixed_heap.v3.FixedHeapConfig", max_heap_size_bytes=config.limits.heap_bytes),
            _monitor(
                "global_downstream_max_connections",
                "downstream_connections.v3.DownstreamConnectionsConfig",
                **connections,
            ),
        ],
        "buffer_factory_config": {"minimum_account_to_track_power_of_two": _TRACKED_STREAM},
        "actions": [
            _action("reset_high_memory_stream", _between(0.85, 0.95)),
            # All timers have one scale. Where no connection is left it is 2 % and not 0: else a client that opens many
            # at once would end every answer that is awaited for 10 s. So idle connections end after 14 s, and such
            # answers after 82.
            _action("reduce_timeouts", _between(0.75, 0.85), _between(0.75 / 2, 1.005 / 2, of=_CONNECTIONS))
            | {"typed_config": _REDUCED},
            _action("shrink_heap", _at(0.9)),
            _action("disable_http_keepalive", _at(0.9)),
            _action("stop_accepting_requests", _at(0.95)),
        ],
        "loadshed_points": [
            {"name": "envoy.load_shed_points.http1_server_abort_dispatch", "triggers": [_at(0.95)]},
        ],
    }


def runtime(config: EnvoyConfig) -> Message:
    """The bound on connections. (The monitor of connections bounds them, too, but at its full scale.)"""
    bound = {f"envoy.resource_limits.listener.{LISTENER}.connection_limit": config.limits.connections}
    return {"layers": [{"name": "limits", "static_layer": bound}]}


def connection_options(config: EnvoyConfig) -> Message:
    """Idle time of a connection; headers with underscores are dropped, since some servers take them for hyphens;
    streams and windows of HTTP/2."""
    return {
        "common_http_protocol_options": {
            "idle_timeout": seconds(config.limits.idle_timeout_s),
            "headers_with_underscores_action": "DROP_HEADER",
        },
        "http2_protocol_options": {
            "max_concurrent_streams": config.limits.streams_per_connection,
            "initial_stream_window_size": _STREAM_WINDOW,
            "initial_connection_window_size": _CONNECTION_WINDOW,
        },
    }


def rates(config: EnvoyConfig) -> list[Message]:
    """A token bucket for every client: by name with API keys, else by address. Without such a limit the filter is there
    for the console's route alone, which has a bucket of its own, and switches it on.

    (The filter of the keys sets the name; a client's own header was removed before.)
    """
    rate = config.limits.client_requests_per_s
    if rate is None:
        alone = http_filter("local_ratelimit", _RATE, {"stat_prefix": "console"}, disabled=True)
        return [] if config.console_port is None else [alone]
    entry = "remote_address"
    action: Message = {"remote_address": {}}
    if config.knows_clients:
        entry = "client"
        action = {"request_headers": {"header_name": keys.CLIENT_HEADER, "descriptor_key": entry}}
    settings = {
        "stat_prefix": "clients",
        # Every request belongs to some client, so this bucket limits none: descriptors only require one.
        "token_bucket": _bucket(1 << 30),
        "always_consume_default_token_bucket": False,
        "filter_enabled": _ALWAYS,
        "filter_enforced": _ALWAYS,
        "descriptors": [{"entries": [{"key": entry}], "token_bucket": _bucket(rate)}],
        "rate_limits": [{"actions": [action]}],
        "max_dynamic_descriptors": _CLIENTS,
    }
    return [http_filter("local_ratelimit", _RATE, settings)]


def console_rate() -> Message:
    """The settings of the filter for the console's route: its clients have no key, and the picker has one thread."""
    return typed(
        f"extensions.filters.http.{_RATE}",
        {
            "stat_prefix": "console",
            "token_bucket": _bucket(_CONSOLE_PER_S),
            "filter_enabled": _ALWAYS,
            "filter_enforced": _ALWAYS,
        },
    )


def mappers() -> list[Message]:
    """Replies where a bound was reached."""
    return [
        *reply(
            expression('response.code_details == "local_rate_limited"'),
            "Too many requests: ask again in a second.",
            "rate_limit_error",
            "rate_limit_exceeded",
            retry_after="1",
        ),
        *reply(
            expression('response.code_details == "overload"'),
            "The gateway is out of memory; try again.",
            "service_unavailable",
            "gateway_overloaded",
            retry_after="1",
            # Envoy itself says 500 where the request was still arriving.
            as_status=503,
        ),
        *reply(
            expression('response.code_details in ["request_overall_timeout", "request_header_timeout"]'),
            "The request did not arrive in time.",
            "invalid_request_error",
            "request_timeout",
        ),
    ]


def _bucket(per_s: int) -> Message:
    """Two seconds' worth may come at once."""
    return {"max_tokens": 2 * per_s, "tokens_per_fill": per_s, "fill_interval": "1s"}


def _monitor(name: str, kind: str, **fields: Any) -> Message:
    return extension(f"resource_monitors.{name}", f"extensions.resource_monitors.{kind}", fields)


def _action(name: str, *triggers: Message) -> Message:
    return {"name": f"envoy.overload_actions.{name}", "triggers": list(triggers)}


def _at(share: float) -> Message:
    return {"name": _HEAP, "threshold": {"value": share}}


def _between(first: float, last: float, *, of: str = _HEAP) -> Message:
    return {"name": of, "scaled": {"scaling_threshold": first, "saturation_threshold": last}}
