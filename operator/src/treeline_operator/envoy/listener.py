"""The gateway's listener: what happens to a request between its first byte and its endpoint."""

from __future__ import annotations

from datetime import timedelta

import betterproto2
from envoy_data_plane.envoy.config.accesslog.v3 import (
    AccessLog,
    AccessLogFilter,
    ComparisonFilter,
    ExtensionFilter,
    ResponseFlagFilter,
    StatusCodeFilter,
)
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation as HeaderChange
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutationRemoveOnMatch
from envoy_data_plane.envoy.config.core.v3 import (
    ApiVersion,
    ConfigSource,
    DataSource,
    ExtensionConfigSource,
    GrpcService,
    GrpcServiceEnvoyGrpc,
    HeaderValue,
    HeaderValueOption,
    HeaderValueOptionHeaderAppendAction,
    PathConfigSource,
    RuntimeUInt32,
    SubstitutionFormatString,
    TrafficDirection,
    TransportSocket,
)
from envoy_data_plane.envoy.config.listener.v3 import Filter, FilterChain, Listener
from envoy_data_plane.envoy.config.route.v3 import (
    HeaderMatcher,
    RetryPolicy,
    RetryPolicyRetryBackOff,
    RetryPolicyRetryHostPredicate,
    Route,
    RouteAction,
    RouteConfiguration,
    RouteMatch,
    VirtualHost,
)
from envoy_data_plane.envoy.extensions.access_loggers.file.v3 import FileAccessLog
from envoy_data_plane.envoy.extensions.access_loggers.filters.cel.v3 import ExpressionFilter
from envoy_data_plane.envoy.extensions.filters.http.api_key_auth.v3 import (
    ApiKeyAuth,
    Credential,
    Forwarding,
    KeySource,
)
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ExternalProcessor,
    MetadataOptions,
    MetadataOptionsMetadataNamespaces,
    ProcessingMode,
    ProcessingModeBodySendMode,
    ProcessingModeHeaderSendMode,
)
from envoy_data_plane.envoy.extensions.filters.http.header_mutation.v3 import HeaderMutation, Mutations
from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    HttpConnectionManager,
    HttpFilter,
    LocalReplyConfig,
    ResponseMapper,
)
from envoy_data_plane.envoy.extensions.retry.host.previous_hosts.v3 import PreviousHostsPredicate
from envoy_data_plane.envoy.extensions.transport_sockets.tls.v3 import (
    CommonTlsContext,
    DownstreamTlsContext,
    SdsSecretConfig,
    TlsCertificate,
)
from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher
from envoy_data_plane.envoy.type.v3 import HttpStatus, StatusCode
from envoy_data_plane.google.protobuf import Any, Struct
from treeline_wire import headers

from treeline_operator.envoy import keys
from treeline_operator.envoy.config import (
    CERTIFICATE,
    EXT_PROC_CLUSTER,
    LONGEST_HOLD,
    NO_TIMEOUT,
    PODS_CLUSTER,
    BodyMode,
    EnvoyConfig,
    Tls,
    address,
)


def listener(config: EnvoyConfig) -> Listener:
    """The one listener, with every filter, route, retry and log line."""
    manager = Filter(
        name="envoy.filters.network.http_connection_manager",
        typed_config=Any.pack(_connection_manager(config)),
    )
    return Listener(
        name="gateway",
        address=address(config.listen_host, config.listen_port),
        # Two Envoys sharing one port would split requests silently; a busy port should be an error.
        enable_reuse_port=False,
        # What `drain_listeners?inboundonly` ends, while the health listener goes on.
        traffic_direction=TrafficDirection.INBOUND,
        filter_chains=[FilterChain(filters=[manager], transport_socket=_tls(config.tls))],
    )


def _tls(tls: Tls | None) -> TransportSocket | None:
    if tls is None:
        return None
    fixed, watched = [], []
    if tls.discovery_file is None:
        certificate = TlsCertificate(
            certificate_chain=DataSource(filename=tls.certificate_file),
            private_key=DataSource(filename=tls.key_file),
        )
        fixed.append(certificate)
    else:
        watched.append(SdsSecretConfig(name=CERTIFICATE, sds_config=_watched(tls.discovery_file)))
    context = CommonTlsContext(
        tls_certificates=fixed,
        tls_certificate_sds_secret_configs=watched,
        alpn_protocols=["h2", "http/1.1"],
    )
    return TransportSocket(
        name="envoy.transport_sockets.tls",
        typed_config=Any.pack(DownstreamTlsContext(common_tls_context=context)),
    )


def _watched(file: str) -> ConfigSource:
    """A file that Envoy reads again when it is replaced by renaming."""
    return ConfigSource(path_config_source=PathConfigSource(path=file), resource_api_version=ApiVersion.V3)


def _connection_manager(config: EnvoyConfig) -> HttpConnectionManager:
    filters = [
        _filter("header_mutation", _edge_headers(config)),
        *_api_keys(config),
        _filter("ext_proc", _ext_proc(config)),
        _filter("router", Router(suppress_envoy_headers=True)),
    ]
    return HttpConnectionManager(
        stat_prefix="gateway",
        route_config=_routes(config),
        http_filters=filters,
        access_log=_access_log(config),
        local_reply_config=_local_replies(),
        use_remote_address=True,
        normalize_path=True,
        merge_slashes=True,
        # A client's own request id is kept, so that its logs, ours and the runtime's can be joined.
        preserve_external_request_id=True,
        always_set_request_id_in_response=True,
        request_headers_timeout=timedelta(seconds=10),
        request_timeout=NO_TIMEOUT,
        # A stream is idle while the picker holds it, and while a long prompt is computed.
        stream_idle_timeout=LONGEST_HOLD,
    )


def _edge_headers(config: EnvoyConfig) -> HeaderMutation:
    """First in the chain: its request part runs before anything reads the headers, its response part after all others.

    (Removal at the route would come too late for requests, and hide our response headers from ext_proc.)
    """
    request = [
        HeaderChange(
            remove_on_match=HeaderMutationRemoveOnMatch(
                key_matcher=StringMatcher(prefix=prefix, ignore_case=True)
            )
        )
        # The last family are orders to Envoy's router (retries, timeouts), which are ours to give.
        for prefix in (headers.DESTINATION, "x-treeline-", "x-envoy-")
    ]
    request.append(HeaderChange(remove="test-epp-endpoint-selection"))
    # A runtime that sees this and no destination knows that no picker was asked, who would have known every name.
    request.append(_set(headers.EDGE, "true"))
    hidden = [] if config.expose_cached_tokens else [headers.CACHED_TOKENS, headers.PROMPT_TOKENS]
    response = [HeaderChange(remove=name) for name in (*hidden, headers.DESTINATION, headers.SERVED)]
    if config.add_endpoint_header:
        response.append(_set(headers.ENDPOINT, "%UPSTREAM_REMOTE_ADDRESS%"))
    else:
        response.append(HeaderChange(remove=headers.ENDPOINT))
    return HeaderMutation(mutations=Mutations(request_mutations=request, response_mutations=response))


def _set(name: str, value: str) -> HeaderChange:
    return HeaderChange(append=_option(name, value))


def _option(name: str, value: str) -> HeaderValueOption:
    return HeaderValueOption(
        header=HeaderValue(key=name, value=value),
        append_action=HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
    )


def _api_keys(config: EnvoyConfig) -> list[HttpFilter]:
    """The filter that knows the keys; none where everybody is served."""
    if config.api_keys_file is not None:
        source = ExtensionConfigSource(
            config_source=_watched(config.api_keys_file), type_urls=[keys.TYPE_URL]
        )
        return [HttpFilter(name=keys.FILTER, config_discovery=source)]
    if not config.api_keys:
        return []
    known = ApiKeyAuth(
        credentials=[Credential(key=key, client=client) for client, key in config.api_keys.items()],
        key_sources=[KeySource(header=header) for header in keys.KEY_HEADERS],
        forwarding=Forwarding(header=keys.CLIENT_HEADER, hide_credentials=True),
    )
    return [_filter("api_key_auth", known)]


def _filter(name: str, message: betterproto2.Message) -> HttpFilter:
    return HttpFilter(name=f"envoy.filters.http.{name}", typed_config=Any.pack(message))


def _ext_proc(config: EnvoyConfig) -> ExternalProcessor:
    send, skip = ProcessingModeHeaderSendMode.SEND, ProcessingModeHeaderSendMode.SKIP

    def trailers(mode: BodyMode) -> ProcessingModeHeaderSendMode:
        return send if mode == "FULL_DUPLEX_STREAMED" else skip  # Envoy refuses full duplex without trailers

    return ExternalProcessor(
        grpc_service=GrpcService(envoy_grpc=GrpcServiceEnvoyGrpc(cluster_name=EXT_PROC_CLUSTER)),
        failure_mode_allow=config.fail_open,
        processing_mode=ProcessingMode(
            request_header_mode=send,
            response_header_mode=send,
            request_body_mode=ProcessingModeBodySendMode[config.request_body_mode],
            response_body_mode=ProcessingModeBodySendMode[config.response_body_mode],
            request_trailer_mode=trailers(config.request_body_mode),
            response_trailer_mode=trailers(config.response_body_mode),
        ),
        message_timeout=timedelta(seconds=config.message_timeout_s),
        max_message_timeout=LONGEST_HOLD,
        status_on_error=HttpStatus(code=StatusCode.ServiceUnavailable),
        metadata_options=MetadataOptions(
            receiving_namespaces=MetadataOptionsMetadataNamespaces(untyped=[headers.LB]),
            forwarding_namespaces=MetadataOptionsMetadataNamespaces(untyped=[headers.LB_SUBSET, headers.LB]),
        ),
    )


def _routes(config: EnvoyConfig) -> RouteConfiguration:
    # What is retried was never started: the next entry of the picker's list, or another pod, takes it. A reset after
    # the request was sent is not retried, so that a request that kills a server does not visit all of them.
    retry = RetryPolicy(
        retry_on="connect-failure,refused-stream,reset-before-request,retriable-headers",
        retriable_headers=[
            HeaderMatcher(name=name, present_match=True) for name in (headers.OVERLOADED, headers.ELSEWHERE)
        ],
        num_retries=2,
        retry_host_predicate=[
            RetryPolicyRetryHostPredicate(
                name="envoy.retry_host_predicates.previous_hosts",
                typed_config=Any.pack(PreviousHostsPredicate()),
            )
        ],
        host_selection_retry_max_attempts=5,
        retry_back_off=RetryPolicyRetryBackOff(
            base_interval=timedelta(milliseconds=5), max_interval=timedelta(milliseconds=50)
        ),
    )
    to_pods = Route(
        match=RouteMatch(prefix="/"),
        route=RouteAction(
            cluster=PODS_CLUSTER, timeout=NO_TIMEOUT, idle_timeout=LONGEST_HOLD, retry_policy=retry
        ),
    )
    everything = VirtualHost(
        name="all", domains=["*"], routes=[to_pods], request_body_buffer_limit=config.body_limit
    )
    return RouteConfiguration(name="gateway", virtual_hosts=[everything])


def _local_replies() -> LocalReplyConfig:
    """Errors made by Envoy itself, in the shape that OpenAI clients parse. Those of the picker pass unchanged."""

    def reply(
        when: AccessLogFilter,
        message: str,
        kind: str,
        code: str,
        *,
        retry_after: str = "",
        as_status: int | None = None,
    ) -> ResponseMapper:
        body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
        return ResponseMapper(
            filter=when,
            status_code=as_status,
            body_format_override=SubstitutionFormatString(json_format=Struct.from_dict(body)),
            headers_to_add=[_option("retry-after", retry_after)] if retry_after else [],
        )

    def picker_failed() -> AccessLogFilter:
        # No response flag tells it, and the picker's own answers are 503 too.
        expression = ExpressionFilter(expression='response.code_details.startsWith("ext_proc_error")')
        cel = ExtensionFilter(
            name="envoy.access_loggers.extension_filters.cel", typed_config=Any.pack(expression)
        )
        return AccessLogFilter(extension_filter=cel)

    def status(code: int) -> AccessLogFilter:
        comparison = ComparisonFilter(
            value=RuntimeUInt32(default_value=code, runtime_key=f"treeline.reply.{code}")
        )
        return AccessLogFilter(status_code_filter=StatusCodeFilter(comparison=comparison))

    def flags(*names: str) -> AccessLogFilter:
        return AccessLogFilter(response_flag_filter=ResponseFlagFilter(flags=list(names)))

    return LocalReplyConfig(
        mappers=[
            reply(status(401), "Missing or unknown API key.", "authentication_error", "invalid_api_key"),
            reply(
                status(413), "The request body is too large.", "invalid_request_error", "request_too_large"
            ),
            reply(flags("UH"), "No endpoint is ready.", "service_unavailable", "no_endpoints"),
            reply(
                flags("UF", "UC", "UR", "URX", "UO", "UT", "UPE"),
                "The endpoint failed before it answered.",
                "service_unavailable",
                "endpoint_failed",
                # Envoy itself says 502 where an endpoint ended in the middle of its answer's headers.
                as_status=503,
            ),
            reply(
                picker_failed(),
                "The picker does not answer; try again.",
                "service_unavailable",
                "picker_unavailable",
                retry_after="1",
            ),
        ]
    )


def _access_log(config: EnvoyConfig) -> list[AccessLog]:
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
        "client": "%DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT%",
    }
    log_format = SubstitutionFormatString(json_format=Struct.from_dict(line))
    file = FileAccessLog(path=config.access_log, log_format=log_format)
    return [AccessLog(name="envoy.access_loggers.file", typed_config=Any.pack(file))]
