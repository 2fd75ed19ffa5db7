"""The gateway's listener: the way of a request from its first byte to its endpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import ip_address
from typing import Final

from treeline_wire import headers
from treeline_wire.paths import BELOW, READ, PathRule, inference_paths

from treeline_operator.envoy import keys, overload
from treeline_operator.envoy.config import (
    COLLECTOR_CLUSTER,
    CONSOLE_CLUSTER,
    EXT_PROC_CLUSTER,
    LISTENER,
    LONGEST_HOLD_S,
    PODS_CLUSTER,
    EnvoyConfig,
)
from treeline_operator.envoy.messages import (
    Message,
    address,
    anything_else,
    expression,
    extension,
    from_file,
    grpc_service,
    header,
    http_filter,
    http_manager,
    previous_hosts,
    reply,
    router,
    seconds,
    status,
    typed,
)
from treeline_operator.envoy.tls import to_clients

_TOKENS: Final = "treeline.tokens"
"""Envoy's dynamic metadata with the tokens of a request, by the names of the runtime's headers."""
_LOG_LINE: Final = {
    "time": "%START_TIME%",
    "request_id": "%REQ(X-REQUEST-ID)%",
    "method": "%REQ(:METHOD)%",
    "path": "%PATH(NQ)%",
    "protocol": "%PROTOCOL%",
    "status": "%RESPONSE_CODE%",
    "details": "%RESPONSE_CODE_DETAILS%",
    "flags": "%RESPONSE_FLAGS%",
    "attempts": "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
    "endpoint": "%UPSTREAM_REMOTE_ADDRESS%",
    "picked": f"%REQ({headers.DESTINATION.upper()})%",
    "bytes_in": "%BYTES_RECEIVED%",
    "bytes_out": "%BYTES_SENT%",
    "ms": "%DURATION%",
    "first_byte_ms": "%RESPONSE_DURATION%",
    "prompt_tokens": f"%DYNAMIC_METADATA({_TOKENS}:{headers.PROMPT_TOKENS})%",
    "cached_tokens": f"%DYNAMIC_METADATA({_TOKENS}:{headers.CACHED_TOKENS})%",
    "client": "%DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT%",
    # the client of the API key
    "api_client": f"%REQ({headers.CLIENT.upper()})%",
}
_TRACED_AS: Final = "treeline-edge"
EDGE_HEADERS_FILTER: Final = "envoy.filters.http.header_mutation"
EXT_PROC_FILTER: Final = "envoy.filters.http.ext_proc"
PICKED_FILTER: Final = "envoy.filters.http.rbac"
_PICKED: Final[Message] = {
    "permissions": [{"any": True}],
    "principals": [{"header": {"name": headers.DESTINATION, "present_match": True}}],
}


def listener(config: EnvoyConfig) -> Message:
    """The one listener, with every filter, route, retry and log line."""
    return {
        "name": LISTENER,
        **address(config.listen_host, config.listen_port),
        # Two Envoys sharing one port would split requests silently; a busy port should be an error.
        "enable_reuse_port": False,
        # What `drain_listeners?inboundonly` ends, while the health listener goes on.
        "traffic_direction": "INBOUND",
        "filter_chains": [
            {
                "filters": [http_manager(_manager(config))],
                **to_clients(config.tls),
                "transport_socket_connect_timeout": seconds(config.limits.headers_timeout_s),
            }
        ],
        "per_connection_buffer_limit_bytes": overload.BUFFER_BYTES,
    }


def _manager(config: EnvoyConfig) -> Message:
    return {
        "stat_prefix": "gateway",
        "route_config": _routes(config),
        "http_filters": [
            http_filter("header_mutation", "header_mutation.v3.HeaderMutation", _edge_headers(config)),
            http_filter("header_to_metadata", "header_to_metadata.v3.Config", _noted_tokens()),
            *_api_keys(config),
            *overload.rates(config),
            # The routes of the allow-list switch these on.
            http_filter("ext_proc", "ext_proc.v3.ExternalProcessor", _ext_proc(config), disabled=True),
            http_filter("rbac", "rbac.v3.RBAC", disabled=True),
            router({"suppress_envoy_headers": True}),
        ],
        "access_log": _access_log(config),
        "local_reply_config": {"mappers": _local_replies()},
        "use_remote_address": True,
        "normalize_path": True,
        "merge_slashes": True,
        # Decoded before the path is compared, and forwarded decoded: an engine sees the path that was allowed.
        "path_with_escaped_slashes_action": "UNESCAPE_AND_FORWARD",
        # A client's own request id is kept, so that its logs, ours and the runtime's can be joined.
        "preserve_external_request_id": True,
        "always_set_request_id_in_response": True,
        **_spans(config),
        **overload.connection_options(config),
        "request_headers_timeout": seconds(config.limits.headers_timeout_s),
        "request_timeout": seconds(config.limits.body_timeout_s),
        "stream_flush_timeout": seconds(config.limits.body_timeout_s),
        # A stream is idle while the picker holds it, and while a long prompt is computed.
        "stream_idle_timeout": seconds(LONGEST_HOLD_S),
    }


def _edge_headers(config: EnvoyConfig) -> Message:
    """First in the chain: its request part runs before anything reads the headers, its response part last.

    (Removing at the route would be too late for requests, and would hide our response headers from ext_proc.)
    """
    request: list[Message] = [
        {"remove_on_match": {"key_matcher": {"prefix": prefix, "ignore_case": True}}}
        # The last group are orders to Envoy's router (retries, timeouts), which clients must not give.
        for prefix in (headers.DESTINATION, "x-treeline-", "x-envoy-")
    ]
    request += [{"remove": name} for name in (headers.SELECTION, headers.RANK, *headers.ENGINES)]
    # A runtime that sees this without a destination knows that no picker, which knows every name, was asked.
    request.append({"append": header(headers.EDGE, "true")})
    if (isolation := _isolation_header(config)) is not None:
        request.append({"append": header(headers.ISOLATION, isolation)})
    hidden = [] if config.expose_cached_tokens else [headers.CACHED_TOKENS, headers.PROMPT_TOKENS]
    response: list[Message] = [{"remove": name} for name in (*hidden, headers.DESTINATION, headers.SERVED)]
    if config.add_endpoint_header:
        response.append({"append": header(headers.ENDPOINT, "%UPSTREAM_REMOTE_ADDRESS%")})
    else:
        response.append({"remove": headers.ENDPOINT})
    return {"mutations": {"request_mutations": request, "response_mutations": response}}


def _noted_tokens() -> Message:
    """Keeps the runtime's token counts for the access log, before they are removed from the response."""
    return {
        "response_rules": [
            {"header": name, "on_header_present": {"metadata_namespace": _TOKENS, "key": name, "type": "NUMBER"}}
            for name in (headers.PROMPT_TOKENS, headers.CACHED_TOKENS)
        ]
    }


def _api_keys(config: EnvoyConfig) -> list[Message]:
    """The filter that knows the keys; none where everybody is served."""
    if config.api_keys_file is not None:
        source = {"config_source": from_file(config.api_keys_file), "type_urls": [keys.TYPE_URL]}
        return [{"name": keys.FILTER, "config_discovery": source}]
    if not config.api_keys:
        return []
    known = tuple((key, client) for client, key in config.api_keys.items())
    return [http_filter("api_key_auth", "api_key_auth.v3.ApiKeyAuth", keys.filter_settings(known))]


def _ext_proc(config: EnvoyConfig) -> Message:
    duplex = config.request_body_mode == "FULL_DUPLEX_STREAMED"
    # While trailers may come the stream stays open: so the picker knows how long a client's answer runs.
    stays = config.response_body_mode == "FULL_DUPLEX_STREAMED" or config.knows_clients
    # A picker that dies before its first answer is replaced; the dead one held at most a reservation.
    retry = {
        "retry_on": "connect-failure,refused-stream,reset,unavailable",
        "num_retries": 2,
        **previous_hosts(),
    }
    return {
        "grpc_service": grpc_service(EXT_PROC_CLUSTER, retry_policy=retry),
        # False would end answers that run, too, when their picker dies: what must not go on is stopped by a later
        # filter. (In full duplex a body may be lost half way, so there it stays false.)
        "failure_mode_allow": not duplex,
        "processing_mode": {
            "request_header_mode": "SEND",
            "response_header_mode": "SEND",
            "request_body_mode": config.request_body_mode,
            "response_body_mode": config.response_body_mode,
            # Envoy refuses full duplex without trailers.
            "request_trailer_mode": "SEND" if duplex else "SKIP",
            "response_trailer_mode": "SEND" if stays else "SKIP",
        },
        "message_timeout": seconds(config.message_timeout_s),
        "max_message_timeout": seconds(LONGEST_HOLD_S),
        "status_on_error": {"code": "ServiceUnavailable"},
        "metadata_options": {
            "receiving_namespaces": {"untyped": [headers.LB]},
            "forwarding_namespaces": {"untyped": [headers.LB_SUBSET, headers.LB]},
        },
    }


def _routes(config: EnvoyConfig) -> Message:
    # Only requests that were never started are retried, at the next entry of the picker's list or another pod. A reset
    # after the request was sent is not retried, so that a request that kills a server does not visit all of them.
    retry = {
        "retry_on": "connect-failure,refused-stream,reset-before-request,retriable-headers",
        "retriable_headers": [
            {"name": name, "present_match": True} for name in (headers.OVERLOADED, headers.ELSEWHERE)
        ],
        "num_retries": 2,
        **previous_hosts(),
        "retry_back_off": {"base_interval": "0.005s", "max_interval": "0.05s"},
    }
    to_pods = {
        "cluster": PODS_CLUSTER,
        "timeout": "0s",
        "idle_timeout": seconds(LONGEST_HOLD_S),
        "retry_policy": retry,
    }
    everything = {
        "name": "all",
        "domains": ["*"],
        "routes": [*_console(config), *_allowed(config, to_pods)],
        "request_body_buffer_limit": config.body_limit,
    }
    return {"name": "gateway", "virtual_hosts": [everything]}


def _console(config: EnvoyConfig) -> list[Message]:
    """The routes of the picker's console, which a browser asks for without a key.

    The picker shows no private data to requests with the edge's header. The header is removed if only clients on this
    machine reach the listener; the picker then checks the browser's headers, as on its own port. The picker also
    redirects `/` to the page: Envoy's own redirects name `http` and the Host, which are not those of the client behind
    a proxy that speaks TLS or changes the Host.
    """
    if config.console_port is None:
        return []
    no_endpoint = {"mutations": {"response_mutations": [{"remove": headers.ENDPOINT}]}}
    filters = {
        EDGE_HEADERS_FILTER: typed("extensions.filters.http.header_mutation.v3.HeaderMutationPerRoute", no_endpoint),
        overload.RATE_FILTER: overload.console_rate(),
    }
    if config.knows_clients:
        filters[keys.FILTER] = typed("config.route.v3.FilterConfig", {"disabled": True})
    local = ip_address(config.listen_host).is_loopback
    page = {
        "match": {"safe_regex": {"regex": _CONSOLE}, **_methods(READ)},
        "route": {"cluster": CONSOLE_CLUSTER, "timeout": "10s"},
        **({"request_headers_to_remove": [headers.EDGE]} if local else {}),
        "typed_per_filter_config": filters,
    }
    return [page]


_CONSOLE: Final = "/(console(/.*)?)?"
_NO_PAGE: Final = {"content-security-policy": "sandbox; default-src 'none'", "x-content-type-options": "nosniff"}
"""An engine's answer that a browser takes for a page runs no script: it would have the console's origin."""


def _allowed(config: EnvoyConfig, to_pods: Message) -> list[Message]:
    """The routes of the engines' inference paths to `to_pods`, then the one that refuses the rest.

    The picker's filter, and the one that stops requests without an endpoint, are off unless a route turns them on. So
    other paths are refused at their headers: the picker is not asked and no body is read.
    """
    asked = {EXT_PROC_FILTER: typed("extensions.filters.http.ext_proc.v3.ExtProcPerRoute", {"overrides": {}})}
    if not config.fail_open:
        rules = {"rules": {"policies": {"picked": _PICKED}}}
        asked[PICKED_FILTER] = typed("extensions.filters.http.rbac.v3.RBACPerRoute", {"rbac": rules})
    more: Message = {}
    if config.console_port is not None:
        more["response_headers_to_add"] = [header(name, value) for name, value in _NO_PAGE.items()]
    served = [
        {"match": _match(rule), "route": to_pods, "typed_per_filter_config": asked, **more}
        for rule in inference_paths(config.engines)
    ]
    # Its text is replaced by the mapper below.
    nothing = {"status": 404, "body": {"inline_string": "not found"}}
    return [*served, {"match": {"prefix": "/"}, "direct_response": nothing}]


def _not_found() -> list[Message]:
    """The answer for other paths. (The picker's 404 names the unknown model, and passes unchanged.)"""
    return reply(
        expression('response.code_details in ["direct_response", "route_not_found"]'),
        "There is nothing to be asked by this method and path.",
        "invalid_request_error",
        "not_found",
    )


def _match(rule: PathRule) -> Message:
    path = {"safe_regex": {"regex": re.escape(rule.path) + BELOW}} if rule.below else {"path": rule.path}
    return {**path, **_methods(rule.methods)}


def _methods(methods: Iterable[str]) -> Message:
    return {"headers": [{"name": ":method", "string_match": {"safe_regex": {"regex": "|".join(methods)}}}]}


def _local_replies() -> list[Message]:
    """Errors made by Envoy itself, in the shape that clients parse. The picker's errors pass unchanged."""

    def flags(*names: str) -> Message:
        return {"response_flag_filter": {"flags": list(names)}}

    return [
        *_not_found(),
        *overload.mappers(),
        *reply(status(401), "Missing or unknown API key.", "authentication_error", "invalid_api_key"),
        *reply(status(413), "The request body is too large.", "invalid_request_error", "request_too_large"),
        *reply(flags("UH"), "No endpoint is ready.", "service_unavailable", "no_endpoints"),
        *reply(
            flags("UF", "UC", "UR", "URX", "UO", "UT", "UPE"),
            "The endpoint failed before it answered.",
            "service_unavailable",
            "endpoint_failed",
            # Envoy itself says 502 where an endpoint ended in the middle of its answer's headers.
            as_status=503,
        ),
        *reply(
            # No response flag tells it, and the picker's own answers are 503 too.
            expression(
                'response.code_details.startsWith("ext_proc_error") || response.code_details.startsWith("rbac")'
            ),
            "The picker does not answer; try again.",
            "service_unavailable",
            "picker_unavailable",
            retry_after="1",
            as_status=503,
        ),
        *anything_else(),
    ]


def _access_log(config: EnvoyConfig) -> list[Message]:
    if config.access_log is None:
        return []
    settings = {"path": config.access_log, "log_format": {"json_format": _LOG_LINE}}
    return [extension("access_loggers.file", "extensions.access_loggers.file.v3.FileAccessLog", settings)]


def _isolation_header(config: EnvoyConfig) -> str | None:
    """The value of the header that the edge sets on every request; None if it sets none.

    Without API keys clients cannot be distinguished. Clients that share a cache must not learn of each other, unless
    everybody may see the routing.
    """
    if not config.knows_clients:
        return None
    if config.isolation == "PerKey":
        return headers.PER_KEY
    return None if config.expose_cached_tokens else headers.SHARED


def _spans(config: EnvoyConfig) -> Message:
    """Envoy's own spans: of a request, of the picker's call and of each attempt at an endpoint; none without tracing.

    Envoy replaces the trace header of the request by the attempt's span, so a runtime's spans are children of the
    attempt that reached it. The metadata of Envoy's call name the parent of the picker's spans.
    """
    asked = config.tracing
    if asked is None:
        return {}
    tracer = {"grpc_service": grpc_service(COLLECTOR_CLUSTER, timeout="1s"), "service_name": _TRACED_AS}
    # By default Envoy encodes the tracing decision in the request id; this keeps a client's own id.
    plain = {"pack_trace_reason": False, "use_request_id_for_trace_sampling": False}
    return {
        "tracing": {
            "provider": extension("tracers.opentelemetry", "config.trace.v3.OpenTelemetryConfig", tracer),
            # For requests without a trace; others follow their trace's decision.
            "random_sampling": {"value": 100 * asked.ratio},
            "spawn_upstream_span": True,
            # As in the access log, a query string is not repeated.
            "custom_tags": [{"tag": "http.url", "value": "%PATH(NQ)%"}],
        },
        "request_id_extension": {"typed_config": typed("extensions.request_id.uuid.v3.UuidRequestIdConfig", plain)},
    }
