"""The gateway's listener: what happens to a request between its first byte and its endpoint."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

import betterproto2
from envoy_data_plane.envoy.config.accesslog import v3 as accesslog_v3
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation as HeaderChange
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutationRemoveOnMatch
from envoy_data_plane.envoy.config.core import v3 as core_v3
from envoy_data_plane.envoy.config.listener.v3 import Filter, FilterChain, Listener
from envoy_data_plane.envoy.config.route import v3 as route_v3
from envoy_data_plane.envoy.config.trace.v3 import OpenTelemetryConfig, TracingHttp
from envoy_data_plane.envoy.extensions.access_loggers.file.v3 import FileAccessLog
from envoy_data_plane.envoy.extensions.filters.http.api_key_auth.v3 import ApiKeyAuth
from envoy_data_plane.envoy.extensions.filters.http.ext_proc import v3 as ext_proc_v3
from envoy_data_plane.envoy.extensions.filters.http.header_mutation.v3 import HeaderMutation, Mutations
from envoy_data_plane.envoy.extensions.filters.http.header_to_metadata import v3 as to_metadata_v3
from envoy_data_plane.envoy.extensions.filters.http.rbac.v3 import Rbac
from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager import v3 as hcm_v3
from envoy_data_plane.envoy.extensions.request_id.uuid.v3 import UuidRequestIdConfig
from envoy_data_plane.envoy.extensions.retry.host.previous_hosts.v3 import PreviousHostsPredicate
from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher
from envoy_data_plane.envoy.type.tracing.v3 import CustomTag
from envoy_data_plane.envoy.type.v3 import HttpStatus, Percent, StatusCode
from envoy_data_plane.google.protobuf import Any, Struct
from treeline_wire import headers

from treeline_operator.envoy import keys, overload, paths
from treeline_operator.envoy.config import (
    COLLECTOR_CLUSTER,
    EXT_PROC_CLUSTER,
    LISTENER,
    LONGEST_HOLD,
    NO_TIMEOUT,
    PODS_CLUSTER,
    EnvoyConfig,
    address,
)
from treeline_operator.envoy.replies import anything_else, expression, header, reply, status
from treeline_operator.envoy.tls import from_file, to_clients

_TOKENS = "treeline.tokens"
"""Envoy's dynamic metadata with the tokens of a request, by the names of the runtime's headers."""
_OTHER_HOSTS = "envoy.retry_host_predicates.previous_hosts"
_CLIENT_LOG_FIELDS: Final = {"api_client": f"%REQ({headers.CLIENT.upper()})%"}
"""What the access log says of the client whom the API key belongs to."""
_TRACED_AS: Final = "treeline-edge"
_SPANS_TIMEOUT: Final = timedelta(seconds=1)


def listener(config: EnvoyConfig) -> Listener:
    """The one listener, with every filter, route, retry and log line."""
    manager = Filter(
        name="envoy.filters.network.http_connection_manager",
        typed_config=Any.pack(_connection_manager(config)),
    )
    return Listener(
        name=LISTENER,
        address=address(config.listen_host, config.listen_port),
        # Two Envoys sharing one port would split requests silently; a busy port should be an error.
        enable_reuse_port=False,
        # What `drain_listeners?inboundonly` ends, while the health listener goes on.
        traffic_direction=core_v3.TrafficDirection.INBOUND,
        filter_chains=[
            FilterChain(
                filters=[manager],
                transport_socket=to_clients(config.tls),
                transport_socket_connect_timeout=timedelta(seconds=config.limits.headers_timeout_s),
            )
        ],
        per_connection_buffer_limit_bytes=overload.BUFFER_BYTES,
    )


def _connection_manager(config: EnvoyConfig) -> hcm_v3.HttpConnectionManager:
    rate = overload.client_rate(config)
    filters = [
        _filter("header_mutation", _edge_headers(config)),
        _filter("header_to_metadata", _noted_tokens()),
        *_api_keys(config),
        *([] if rate is None else [_filter("local_ratelimit", rate)]),
        # The routes of the allow-list switch these on.
        hcm_v3.HttpFilter(name=paths.EXT_PROC_FILTER, typed_config=Any.pack(_ext_proc(config)), disabled=True),
        hcm_v3.HttpFilter(name=paths.PICKED_FILTER, typed_config=Any.pack(Rbac()), disabled=True),
        _filter("router", Router(suppress_envoy_headers=True)),
    ]
    return hcm_v3.HttpConnectionManager(
        stat_prefix="gateway",
        route_config=_routes(config),
        http_filters=filters,
        access_log=_access_log(config),
        local_reply_config=_local_replies(),
        use_remote_address=True,
        normalize_path=True,
        merge_slashes=True,
        # Undone before the path is compared, and passed on undone: an engine sees the path that was allowed.
        path_with_escaped_slashes_action=hcm_v3.HttpConnectionManagerPathWithEscapedSlashesAction.UNESCAPE_AND_FORWARD,
        # A client's own request id is kept, so that its logs, ours and the runtime's can be joined.
        preserve_external_request_id=True,
        always_set_request_id_in_response=True,
        request_id_extension=_request_ids(config),
        tracing=_spans(config),
        common_http_protocol_options=overload.connection_options(config),
        http2_protocol_options=overload.http2_options(config),
        request_headers_timeout=timedelta(seconds=config.limits.headers_timeout_s),
        request_timeout=timedelta(seconds=config.limits.body_timeout_s),
        stream_flush_timeout=timedelta(seconds=config.limits.body_timeout_s),
        # A stream is idle while the picker holds it, and while a long prompt is computed.
        stream_idle_timeout=LONGEST_HOLD,
    )


def _edge_headers(config: EnvoyConfig) -> HeaderMutation:
    """First in the chain: its request part runs before anything reads the headers, its response part after all others.

    (Removal at the route would come too late for requests, and hide our response headers from ext_proc.)
    """
    request = [
        HeaderChange(
            remove_on_match=HeaderMutationRemoveOnMatch(key_matcher=StringMatcher(prefix=prefix, ignore_case=True))
        )
        # The last family are orders to Envoy's router (retries, timeouts), which are ours to give.
        for prefix in (headers.DESTINATION, "x-treeline-", "x-envoy-")
    ]
    request.append(HeaderChange(remove="test-epp-endpoint-selection"))
    # A runtime that sees this and no destination knows that no picker was asked, who would have known every name.
    request.append(_set(headers.EDGE, "true"))
    if (isolation := _isolation_header(config)) is not None:
        request.append(_set(headers.ISOLATION, isolation))
    hidden = [] if config.expose_cached_tokens else [headers.CACHED_TOKENS, headers.PROMPT_TOKENS]
    response = [HeaderChange(remove=name) for name in (*hidden, headers.DESTINATION, headers.SERVED)]
    if config.add_endpoint_header:
        response.append(_set(headers.ENDPOINT, "%UPSTREAM_REMOTE_ADDRESS%"))
    else:
        response.append(HeaderChange(remove=headers.ENDPOINT))
    return HeaderMutation(mutations=Mutations(request_mutations=request, response_mutations=response))


def _noted_tokens() -> to_metadata_v3.Config:
    """Keeps for the access log what a runtime says of a request's tokens, before that is removed from the response."""
    return to_metadata_v3.Config(
        response_rules=[
            to_metadata_v3.ConfigRule(
                header=name,
                on_header_present=to_metadata_v3.ConfigKeyValuePair(
                    metadata_namespace=_TOKENS, key=name, type=to_metadata_v3.ConfigValueType.NUMBER
                ),
            )
            for name in (headers.PROMPT_TOKENS, headers.CACHED_TOKENS)
        ]
    )


def _set(name: str, value: str) -> HeaderChange:
    return HeaderChange(append=header(name, value))


def _api_keys(config: EnvoyConfig) -> list[hcm_v3.HttpFilter]:
    """The filter that knows the keys; none where everybody is served."""
    if config.api_keys_file is not None:
        source = core_v3.ExtensionConfigSource(config_source=from_file(config.api_keys_file), type_urls=[keys.TYPE_URL])
        return [hcm_v3.HttpFilter(name=keys.FILTER, config_discovery=source)]
    if not config.api_keys:
        return []
    known = tuple((key, client) for client, key in config.api_keys.items())
    return [_filter("api_key_auth", ApiKeyAuth.from_dict(keys.filter_settings(known)))]


def _filter(name: str, message: betterproto2.Message) -> hcm_v3.HttpFilter:
    return hcm_v3.HttpFilter(name=f"envoy.filters.http.{name}", typed_config=Any.pack(message))


def _ext_proc(config: EnvoyConfig) -> ext_proc_v3.ExternalProcessor:
    send, skip = ext_proc_v3.ProcessingModeHeaderSendMode.SEND, ext_proc_v3.ProcessingModeHeaderSendMode.SKIP

    # Envoy refuses full duplex without trailers.
    request_trailers = send if config.request_body_mode == "FULL_DUPLEX_STREAMED" else skip
    # While trailers may come the stream stays open: so the picker knows how long a client's answer runs.
    response_trailers = send if config.response_body_mode == "FULL_DUPLEX_STREAMED" or config.knows_clients else skip

    # A picker that dies before its first word is replaced by another; the one that is gone held a reservation at most.
    retry = core_v3.RetryPolicy(
        retry_on="connect-failure,refused-stream,reset,unavailable",
        num_retries=2,
        retry_host_predicate=[
            core_v3.RetryPolicyRetryHostPredicate(name=_OTHER_HOSTS, typed_config=Any.pack(PreviousHostsPredicate()))
        ],
        host_selection_retry_max_attempts=5,
    )
    picker = core_v3.GrpcServiceEnvoyGrpc(cluster_name=EXT_PROC_CLUSTER)
    return ext_proc_v3.ExternalProcessor(
        grpc_service=core_v3.GrpcService(envoy_grpc=picker, retry_policy=retry),
        # False would end answers that run, too, when their picker dies: what must not go on is stopped by a later
        # filter. (In full duplex a body may be lost half way, so there it stays false.)
        failure_mode_allow=config.request_body_mode != "FULL_DUPLEX_STREAMED",
        processing_mode=ext_proc_v3.ProcessingMode(
            request_header_mode=send,
            response_header_mode=send,
            request_body_mode=ext_proc_v3.ProcessingModeBodySendMode[config.request_body_mode],
            response_body_mode=ext_proc_v3.ProcessingModeBodySendMode[config.response_body_mode],
            request_trailer_mode=request_trailers,
            response_trailer_mode=response_trailers,
        ),
        message_timeout=timedelta(seconds=config.message_timeout_s),
        max_message_timeout=LONGEST_HOLD,
        status_on_error=HttpStatus(code=StatusCode.ServiceUnavailable),
        metadata_options=ext_proc_v3.MetadataOptions(
            receiving_namespaces=ext_proc_v3.MetadataOptionsMetadataNamespaces(untyped=[headers.LB]),
            forwarding_namespaces=ext_proc_v3.MetadataOptionsMetadataNamespaces(
                untyped=[headers.LB_SUBSET, headers.LB]
            ),
        ),
    )


def _routes(config: EnvoyConfig) -> route_v3.RouteConfiguration:
    # What is retried was never started: the next entry of the picker's list, or another pod, takes it. A reset after
    # the request was sent is not retried, so that a request that kills a server does not visit all of them.
    retry = route_v3.RetryPolicy(
        retry_on="connect-failure,refused-stream,reset-before-request,retriable-headers",
        retriable_headers=[
            route_v3.HeaderMatcher(name=name, present_match=True) for name in (headers.OVERLOADED, headers.ELSEWHERE)
        ],
        num_retries=2,
        retry_host_predicate=[
            route_v3.RetryPolicyRetryHostPredicate(
                name=_OTHER_HOSTS,
                typed_config=Any.pack(PreviousHostsPredicate()),
            )
        ],
        host_selection_retry_max_attempts=5,
        retry_back_off=route_v3.RetryPolicyRetryBackOff(
            base_interval=timedelta(milliseconds=5), max_interval=timedelta(milliseconds=50)
        ),
    )
    to_pods = route_v3.RouteAction(
        cluster=PODS_CLUSTER, timeout=NO_TIMEOUT, idle_timeout=LONGEST_HOLD, retry_policy=retry
    )
    everything = route_v3.VirtualHost(
        name="all",
        domains=["*"],
        routes=paths.routes(config.engines, to_pods, picked_only=not config.fail_open),
        request_body_buffer_limit=config.body_limit,
    )
    return route_v3.RouteConfiguration(name="gateway", virtual_hosts=[everything])


def _local_replies() -> hcm_v3.LocalReplyConfig:
    """Errors made by Envoy itself, in the shape that clients parse. Those of the picker pass unchanged."""

    def flags(*names: str) -> accesslog_v3.AccessLogFilter:
        return accesslog_v3.AccessLogFilter(response_flag_filter=accesslog_v3.ResponseFlagFilter(flags=list(names)))

    return hcm_v3.LocalReplyConfig(
        mappers=[
            *paths.not_found(),
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
    )


def _access_log(config: EnvoyConfig) -> list[accesslog_v3.AccessLog]:
    if config.access_log is None:
        return []
    line = {
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
        **_CLIENT_LOG_FIELDS,
    }
    log_format = core_v3.SubstitutionFormatString(json_format=Struct.from_dict(line))
    file = FileAccessLog(path=config.access_log, log_format=log_format)
    return [accesslog_v3.AccessLog(name="envoy.access_loggers.file", typed_config=Any.pack(file))]


def _isolation_header(config: EnvoyConfig) -> str | None:
    """The value of the header that the edge sets on every request; None where it sets none.

    Without API keys there is nobody to tell apart. Clients that share a cache are kept from learning of each other, but
    not where everybody is to see the routing.
    """
    if not config.knows_clients:
        return None
    if config.isolation == "PerKey":
        return headers.PER_KEY
    return None if config.expose_cached_tokens else headers.SHARED


def _spans(config: EnvoyConfig) -> hcm_v3.HttpConnectionManagerTracing | None:
    """Envoy's own spans, of a request, of the picker's call and of each attempt at an endpoint; None for none.

    Envoy writes the span of an attempt into the request that it sends, over whatever the picker has set there; the
    picker learns of Envoy's spans by the call's metadata. So `ingress` has the picker's spans under its call, and a
    runtime's under the attempt that reached it.
    """
    asked = config.tracing
    if asked is None:
        return None
    service = core_v3.GrpcService(
        envoy_grpc=core_v3.GrpcServiceEnvoyGrpc(cluster_name=COLLECTOR_CLUSTER), timeout=_SPANS_TIMEOUT
    )
    tracer = OpenTelemetryConfig(grpc_service=service, service_name=_TRACED_AS)
    return hcm_v3.HttpConnectionManagerTracing(
        provider=TracingHttp(name="envoy.tracers.opentelemetry", typed_config=Any.pack(tracer)),
        # Of requests that come without a trace; of the others their senders have decided.
        random_sampling=Percent(value=100 * asked.ratio),
        spawn_upstream_span=True,
        # As in the access log, a query string is not repeated.
        custom_tags=[CustomTag(tag="http.url", value="%PATH(NQ)%")],
    )


def _request_ids(config: EnvoyConfig) -> hcm_v3.RequestIdExtension | None:
    """By default Envoy notes in a request's id whether it is traced: a client's own id stays what it is."""
    if config.tracing is None:
        return None
    plain = UuidRequestIdConfig(pack_trace_reason=False, use_request_id_for_trace_sampling=False)
    return hcm_v3.RequestIdExtension(typed_config=Any.pack(plain))
