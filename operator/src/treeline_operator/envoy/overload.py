"""What the edge does when it is asked for more than it has: bounds on memory, connections, time and each client.

A request's body is buffered whole, because the picker reads it before it chooses. So a body that stops half way is
ended after the body timeout, and the memory of all bodies together is bounded by the heap limit: near to it nothing new
is taken in, and what is still arriving is ended.
"""

from __future__ import annotations

from datetime import timedelta

import betterproto2
from envoy_data_plane.envoy.config.bootstrap.v3 import LayeredRuntime, RuntimeLayer
from envoy_data_plane.envoy.config.core import v3 as core_v3
from envoy_data_plane.envoy.config.overload import v3 as overload_v3
from envoy_data_plane.envoy.config.route import v3 as route_v3
from envoy_data_plane.envoy.extensions.common.ratelimit import v3 as ratelimit_v3
from envoy_data_plane.envoy.extensions.filters.http.local_ratelimit.v3 import LocalRateLimit
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import ResponseMapper
from envoy_data_plane.envoy.extensions.resource_monitors.downstream_connections.v3 import (
    DownstreamConnectionsConfig,
)
from envoy_data_plane.envoy.extensions.resource_monitors.fixed_heap.v3 import FixedHeapConfig
from envoy_data_plane.envoy.type.v3 import FractionalPercent, FractionalPercentDenominatorType, TokenBucket
from envoy_data_plane.google.protobuf import Any, Struct

from treeline_operator.envoy import keys, replies
from treeline_operator.envoy.config import LISTENER, EnvoyConfig

BUFFER_BYTES = 32 * 1024
"""Of a connection in each direction, beyond which its other side is not read. Bodies for the picker have their own
bound."""
_HEAP = "envoy.resource_monitors.fixed_heap"
_CONNECTIONS = "envoy.resource_monitors.global_downstream_max_connections"
_TRACKED_STREAM = 20
"""Streams with at least two to this power bytes in buffers can be found and ended."""
_STREAM_WINDOW = 256 * 1024
_CONNECTION_WINDOW = 1024 * 1024
_IDLE_S = 2
"""How long a connection may be without a request when memory is short."""
_SILENT_S = 10
"""How long a request may be silent when memory is short."""
_CLIENTS = 10_000
"""How many clients' rates are remembered at once."""
_CLIENT = "client"


def overload_manager(config: EnvoyConfig) -> overload_v3.OverloadManager:
    """From 75 % of the heap limit on idle connections and silent requests are ended sooner, and from 85 % on after
    seconds; then HTTP/2 streams with large bodies are reset, the largest first; from 95 % on new requests are answered
    503, and HTTP/1.1 requests that are still arriving too. From 75 % of the connections on those without a request are
    ended sooner, and soon once nobody else is let in."""
    timers = overload_v3.ScaleTimersOverloadActionConfigTimerType
    reduced = overload_v3.ScaleTimersOverloadActionConfig(
        timer_scale_factors=[
            overload_v3.ScaleTimersOverloadActionConfigScaleTimer(timer=timer, min_timeout=timedelta(seconds=seconds))
            for timer, seconds in (
                (timers.HTTP_DOWNSTREAM_CONNECTION_IDLE, _IDLE_S),
                # A stream is idle when its body stops half way, when nobody reads its answer, and also while it waits
                # for its first token. Some of the latter are lost; without this, every new request would be.
                (timers.HTTP_DOWNSTREAM_STREAM_IDLE, _SILENT_S),
            )
        ]
    )
    return overload_v3.OverloadManager(
        refresh_interval=timedelta(milliseconds=100),
        resource_monitors=[
            _monitor(_HEAP, FixedHeapConfig(max_heap_size_bytes=config.limits.heap_bytes)),
            _monitor(
                _CONNECTIONS,
                DownstreamConnectionsConfig(max_active_downstream_connections=2 * config.limits.connections),
            ),
        ],
        buffer_factory_config=overload_v3.BufferFactoryConfig(minimum_account_to_track_power_of_two=_TRACKED_STREAM),
        actions=[
            _action("reset_high_memory_stream", _between(0.85, 0.95)),
            # All timers have one scale. Where no connection is left it is 2 % and not 0: else whoever opens many at
            # once would end each answer that is awaited for 10 s. So idle connections end after 14 s, and such answers
            # after 82.
            _action(
                "reduce_timeouts", _between(0.75, 0.85), _between(0.75 / 2, 1.005 / 2, of=_CONNECTIONS), message=reduced
            ),
            _action("shrink_heap", _at(0.9)),
            _action("disable_http_keepalive", _at(0.9)),
            _action("stop_accepting_requests", _at(0.95)),
        ],
        loadshed_points=[
            overload_v3.LoadShedPoint(name="envoy.load_shed_points.http1_server_abort_dispatch", triggers=[_at(0.95)])
        ],
    )


def runtime(config: EnvoyConfig) -> LayeredRuntime:
    """The bound on connections. (The monitor of connections bounds them, too, but at its full scale.)"""
    bound = Struct.from_dict({f"envoy.resource_limits.listener.{LISTENER}.connection_limit": config.limits.connections})
    return LayeredRuntime(layers=[RuntimeLayer(name="limits", static_layer=bound)])


def connection_options(config: EnvoyConfig) -> core_v3.HttpProtocolOptions:
    """How long a connection without a request stays; header names with underscores, which some servers take for
    hyphens, are dropped."""
    return core_v3.HttpProtocolOptions(
        idle_timeout=timedelta(seconds=config.limits.idle_timeout_s),
        headers_with_underscores_action=core_v3.HttpProtocolOptionsHeadersWithUnderscoresAction.DROP_HEADER,
    )


def http2_options(config: EnvoyConfig) -> core_v3.Http2ProtocolOptions:
    """Streams and windows of an HTTP/2 connection."""
    return core_v3.Http2ProtocolOptions(
        max_concurrent_streams=config.limits.streams_per_connection,
        initial_stream_window_size=_STREAM_WINDOW,
        initial_connection_window_size=_CONNECTION_WINDOW,
    )


def client_rate(config: EnvoyConfig) -> LocalRateLimit | None:
    """A token bucket for every client: by its name where there are API keys, else by its address. None without a
    limit. (The name is set by the filter of the keys; what a client says of itself was removed before.)"""
    rate = config.limits.client_requests_per_s
    if rate is None:
        return None
    if config.knows_clients:
        named = route_v3.RateLimitActionRequestHeaders(header_name=keys.CLIENT_HEADER, descriptor_key=_CLIENT)
        entry, action = _CLIENT, route_v3.RateLimitAction(request_headers=named)
    else:
        entry, action = (
            "remote_address",
            route_v3.RateLimitAction(remote_address=route_v3.RateLimitActionRemoteAddress()),
        )
    always = core_v3.RuntimeFractionalPercent(
        default_value=FractionalPercent(numerator=100, denominator=FractionalPercentDenominatorType.HUNDRED)
    )
    return LocalRateLimit(
        stat_prefix="clients",
        # Who is nobody's client does not exist; this one is for descriptors only.
        token_bucket=_bucket(1 << 30),
        always_consume_default_token_bucket=False,
        filter_enabled=always,
        filter_enforced=always,
        descriptors=[
            ratelimit_v3.LocalRateLimitDescriptor(
                entries=[ratelimit_v3.RateLimitDescriptorEntry(key=entry)], token_bucket=_bucket(rate)
            )
        ],
        rate_limits=[route_v3.RateLimit(actions=[action])],
        max_dynamic_descriptors=_CLIENTS,
    )


def mappers() -> list[ResponseMapper]:
    """What clients are told where a bound was reached."""
    return [
        *replies.reply(
            replies.expression('response.code_details == "local_rate_limited"'),
            "Too many requests from this client.",
            "rate_limit_error",
            "rate_limit_exceeded",
            retry_after="1",
        ),
        *replies.reply(
            replies.expression('response.code_details == "overload"'),
            "The gateway is out of memory; try again.",
            "service_unavailable",
            "gateway_overloaded",
            retry_after="1",
            # Envoy itself says 500 where the request was still arriving.
            as_status=503,
        ),
        *replies.reply(
            replies.expression('response.code_details in ["request_overall_timeout", "request_header_timeout"]'),
            "The request did not arrive in time.",
            "invalid_request_error",
            "request_timeout",
        ),
    ]


def _bucket(per_s: int) -> TokenBucket:
    """Two seconds' worth may come at once."""
    return TokenBucket(max_tokens=2 * per_s, tokens_per_fill=per_s, fill_interval=timedelta(seconds=1))


def _monitor(name: str, message: betterproto2.Message) -> overload_v3.ResourceMonitor:
    return overload_v3.ResourceMonitor(name=name, typed_config=Any.pack(message))


def _action(
    name: str, *triggers: overload_v3.Trigger, message: betterproto2.Message | None = None
) -> overload_v3.OverloadAction:
    typed = None if message is None else Any.pack(message)
    return overload_v3.OverloadAction(
        name=f"envoy.overload_actions.{name}", triggers=list(triggers), typed_config=typed
    )


def _at(share: float) -> overload_v3.Trigger:
    return overload_v3.Trigger(name=_HEAP, threshold=overload_v3.ThresholdTrigger(value=share))


def _between(first: float, last: float, *, of: str = _HEAP) -> overload_v3.Trigger:
    return overload_v3.Trigger(
        name=of, scaled=overload_v3.ScaledTrigger(scaling_threshold=first, saturation_threshold=last)
    )
