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

import ipaddress
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any as Json
from typing import Literal

import betterproto2
from envoy_data_plane.envoy.config.accesslog.v3 import (
    AccessLog,
    AccessLogFilter,
    ComparisonFilter,
    ResponseFlagFilter,
    StatusCodeFilter,
)
from envoy_data_plane.envoy.config.bootstrap.v3 import Admin, Bootstrap, BootstrapStaticResources
from envoy_data_plane.envoy.config.cluster.v3 import (
    CircuitBreakers,
    CircuitBreakersThresholds,
    Cluster,
    ClusterCommonLbConfig,
    ClusterDiscoveryType,
    ClusterEdsClusterConfig,
    LoadBalancingPolicy,
    LoadBalancingPolicyPolicy,
)
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation as HeaderChange
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutationRemoveOnMatch
from envoy_data_plane.envoy.config.core.v3 import (
    Address,
    ApiConfigSource,
    ApiConfigSourceApiType,
    ApiVersion,
    BackoffStrategy,
    ConfigSource,
    DataSource,
    GrpcService,
    GrpcServiceEnvoyGrpc,
    HeaderValue,
    HeaderValueOption,
    HeaderValueOptionHeaderAppendAction,
    HealthCheck,
    HealthCheckGrpcHealthCheck,
    Http1ProtocolOptions,
    Http2ProtocolOptions,
    HttpProtocolOptions,
    Node,
    RuntimeUInt32,
    SocketAddress,
    SubstitutionFormatString,
    TransportSocket,
    TypedExtensionConfig,
)
from envoy_data_plane.envoy.config.core.v3 import RetryPolicy as StreamRetryPolicy
from envoy_data_plane.envoy.config.endpoint.v3 import (
    ClusterLoadAssignment,
    Endpoint,
    EndpointHealthCheckConfig,
    LbEndpoint,
    LocalityLbEndpoints,
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
from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host.v3 import (
    OverrideHost,
    OverrideHostOverrideHostSource,
)
from envoy_data_plane.envoy.extensions.load_balancing_policies.round_robin.v3 import RoundRobin
from envoy_data_plane.envoy.extensions.retry.host.previous_hosts.v3 import PreviousHostsPredicate
from envoy_data_plane.envoy.extensions.transport_sockets.tls.v3 import (
    CommonTlsContext,
    DownstreamTlsContext,
    TlsCertificate,
)
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import HttpProtocolOptions as UpstreamHttpOptions
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import HttpProtocolOptionsExplicitHttpConfig
from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher
from envoy_data_plane.envoy.type.metadata.v3 import MetadataKey, MetadataKeyPathSegment
from envoy_data_plane.envoy.type.v3 import Percent
from envoy_data_plane.google.protobuf import Any, Struct
from treeline_wire import headers, ports

PODS_CLUSTER = "pods"
EXT_PROC_CLUSTER = "ext_proc"
EDS_CLUSTER = "eds"
HEALTH_NAME = "envoy.service.ext_proc.v3.ExternalProcessor"
"""The name under which the picker's gRPC health service answers for its ext_proc port."""

BodyMode = Literal["NONE", "STREAMED", "BUFFERED", "FULL_DUPLEX_STREAMED"]

# A stream on the ext_proc cluster and a request on the pods cluster may live for a whole generation; Envoy's default of
# 1024 would turn the 1025th concurrent generation into an error.
_MAX_CONCURRENT = 65_536
# The longest time the picker may hold a request (flow control, waking from zero). Envoy's own upper bound is one hour.
_LONGEST_HOLD = timedelta(hours=1)
_NO_TIMEOUT = timedelta(0)


@dataclass(frozen=True)
class Tls:
    """The listener's certificate chain and private key, as PEM files that Envoy reads."""

    certificate_file: str
    key_file: str


@dataclass(frozen=True)
class EnvoyConfig:
    """What a data plane needs to know. The defaults are a loopback listener in front of a picker on this machine.

    ``body_limit`` is in bytes; a larger request body is answered 413. ``api_keys`` maps a client's name to its key;
    empty means open. ``access_log`` is a path such as ``/dev/stdout``; ``None`` means none.
    """

    listen_host: str = "127.0.0.1"
    listen_port: int = ports.GATEWAY
    admin_port: int = 0
    epp_host: str = "127.0.0.1"
    ext_proc_port: int = ports.EXT_PROC
    eds_port: int = ports.EDS
    node_id: str = "treeline"
    node_cluster: str = "treeline"
    body_limit: int = 32 * 1024 * 1024
    api_keys: Mapping[str, str] | None = None
    tls: Tls | None = None
    expose_cached_tokens: bool = False
    add_endpoint_header: bool = False
    fail_open: bool = True
    request_body_mode: BodyMode = "BUFFERED"
    response_body_mode: BodyMode = "NONE"
    access_log: str | None = "/dev/stdout"
    message_timeout_s: float = 1.0
    connect_timeout_s: float = 1.0
    upstream_idle_timeout_s: float = 4.0
    """Shorter than the 5 s after which common Python servers close an idle connection, so that a request never races
    with that close."""

    def __post_init__(self) -> None:
        if self.request_body_mode == "FULL_DUPLEX_STREAMED" and self.fail_open:
            raise ValueError(
                "fail_open does not work with FULL_DUPLEX_STREAMED bodies: Envoy answers 500 instead"
            )
        if self.body_limit < 1024:
            raise ValueError("body_limit is in bytes and must be at least 1024")
        for client, key in (self.api_keys or {}).items():
            if not key.strip() or not client.strip():
                raise ValueError("an API key and its client's name must not be empty")


def bootstrap(config: EnvoyConfig) -> dict[str, Json]:
    """The bootstrap as plain JSON types; ``json.dump`` of it is a file for ``envoy --config-path``."""
    message = Bootstrap(
        node=Node(id=config.node_id, cluster=config.node_cluster),
        # The admin page can stop the process and shows the configuration with its keys: loopback only.
        admin=Admin(address=_address("127.0.0.1", config.admin_port)),
        static_resources=BootstrapStaticResources(
            listeners=[_listener(config)],
            clusters=[_pods_cluster(config), _ext_proc_cluster(config), _eds_cluster(config)],
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


# --- listener ---------------------------------------------------------------------------------------------------------


def _listener(config: EnvoyConfig) -> Listener:
    transport = None
    if config.tls is not None:
        certificate = TlsCertificate(
            certificate_chain=DataSource(filename=config.tls.certificate_file),
            private_key=DataSource(filename=config.tls.key_file),
        )
        context = CommonTlsContext(tls_certificates=[certificate], alpn_protocols=["h2", "http/1.1"])
        transport = TransportSocket(
            name="envoy.transport_sockets.tls",
            typed_config=Any.pack(DownstreamTlsContext(common_tls_context=context)),
        )
    manager = Filter(
        name="envoy.filters.network.http_connection_manager",
        typed_config=Any.pack(_connection_manager(config)),
    )
    return Listener(
        name="gateway",
        address=_address(config.listen_host, config.listen_port),
        # Two Envoys sharing one port would split requests silently; a busy port should be an error.
        enable_reuse_port=False,
        filter_chains=[FilterChain(filters=[manager], transport_socket=transport)],
    )


def _connection_manager(config: EnvoyConfig) -> HttpConnectionManager:
    filters: list[tuple[str, betterproto2.Message]] = [("header_mutation", _edge_headers(config))]
    if config.api_keys:
        filters.append(("api_key_auth", _api_keys(config.api_keys)))
    filters.append(("ext_proc", _ext_proc(config)))
    filters.append(("router", Router(suppress_envoy_headers=True)))
    return HttpConnectionManager(
        stat_prefix="gateway",
        route_config=_routes(config),
        http_filters=[
            HttpFilter(name=f"envoy.filters.http.{name}", typed_config=Any.pack(message))
            for name, message in filters
        ],
        access_log=_access_log(config),
        local_reply_config=_local_replies(),
        use_remote_address=True,
        normalize_path=True,
        merge_slashes=True,
        # A client's own request id is kept, so that its logs, ours and the runtime's can be joined.
        preserve_external_request_id=True,
        always_set_request_id_in_response=True,
        request_headers_timeout=timedelta(seconds=10),
        request_timeout=_NO_TIMEOUT,
        # A stream is idle while the picker holds it, and while a long prompt is computed.
        stream_idle_timeout=_LONGEST_HOLD,
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
    hidden = [] if config.expose_cached_tokens else [headers.CACHED_TOKENS, headers.PROMPT_TOKENS]
    response = [HeaderChange(remove=name) for name in (*hidden, headers.DESTINATION, headers.SERVED)]
    if config.add_endpoint_header:
        served = HeaderValueOption(
            header=HeaderValue(key=headers.ENDPOINT, value="%UPSTREAM_REMOTE_ADDRESS%"),
            append_action=HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
        )
        response.append(HeaderChange(append=served))
    else:
        response.append(HeaderChange(remove=headers.ENDPOINT))
    return HeaderMutation(mutations=Mutations(request_mutations=request, response_mutations=response))


def _api_keys(keys: Mapping[str, str]) -> ApiKeyAuth:
    return ApiKeyAuth(
        credentials=[Credential(key=key, client=client) for client, key in keys.items()],
        # "Bearer " is stripped by the filter. The second name is what several other clients send.
        key_sources=[KeySource(header="authorization"), KeySource(header="x-api-key")],
        forwarding=Forwarding(header="x-treeline-client", hide_credentials=True),
    )


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
        max_message_timeout=_LONGEST_HOLD,
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
        retriable_headers=[HeaderMatcher(name=headers.OVERLOADED, present_match=True)],
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
            cluster=PODS_CLUSTER, timeout=_NO_TIMEOUT, idle_timeout=_LONGEST_HOLD, retry_policy=retry
        ),
    )
    everything = VirtualHost(
        name="all", domains=["*"], routes=[to_pods], request_body_buffer_limit=config.body_limit
    )
    return RouteConfiguration(name="gateway", virtual_hosts=[everything])


def _local_replies() -> LocalReplyConfig:
    """Errors made by Envoy itself, in the shape that OpenAI clients parse. Those of the picker pass unchanged."""

    def reply(when: AccessLogFilter, message: str, kind: str, code: str) -> ResponseMapper:
        body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
        return ResponseMapper(
            filter=when, body_format_override=SubstitutionFormatString(json_format=Struct.from_dict(body))
        )

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
                flags("UF", "UC", "UR", "URX", "UO", "UT"),
                "The endpoint failed before it answered.",
                "service_unavailable",
                "endpoint_failed",
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


# --- clusters ---------------------------------------------------------------------------------------------------------


def _pods_cluster(config: EnvoyConfig) -> Cluster:
    def key(name: str) -> MetadataKey:
        return MetadataKey(key=headers.LB, path=[MetadataKeyPathSegment(key=name)])

    override = OverrideHost(
        override_host_sources=[
            OverrideHostOverrideHostSource(header=headers.DESTINATION),
            OverrideHostOverrideHostSource(metadata=key(headers.DESTINATION)),
        ],
        # So the picker sees, with the response headers, which host really served.
        selected_host_key=key(headers.SERVED),
        fallback_policy=_policy("round_robin", RoundRobin()),
    )
    # How soon the stream is opened again after the picker was away; Envoy's own bounds are 0.5 s to 30 s.
    back_off = BackoffStrategy(base_interval=timedelta(milliseconds=100), max_interval=timedelta(seconds=1))
    retry = StreamRetryPolicy(retry_back_off=back_off)
    source = ApiConfigSource(
        api_type=ApiConfigSourceApiType.GRPC,
        transport_api_version=ApiVersion.V3,
        grpc_services=[
            GrpcService(envoy_grpc=GrpcServiceEnvoyGrpc(cluster_name=EDS_CLUSTER, retry_policy=retry))
        ],
        set_node_on_first_message_only=True,
    )
    eds = ConfigSource(
        api_config_source=source,
        resource_api_version=ApiVersion.V3,
        # How long the listener waits for endpoints at start, should the picker be away.
        initial_fetch_timeout=timedelta(seconds=5),
    )
    return Cluster(
        name=PODS_CLUSTER,
        type=ClusterDiscoveryType.EDS,
        eds_cluster_config=ClusterEdsClusterConfig(eds_config=eds, service_name=PODS_CLUSTER),
        connect_timeout=timedelta(seconds=config.connect_timeout_s),
        load_balancing_policy=_policy("override_host", override),
        # Never spread requests over endpoints known to be bad or draining, even if most are.
        common_lb_config=ClusterCommonLbConfig(healthy_panic_threshold=Percent(value=0.0)),
        circuit_breakers=_circuit_breakers(),
        typed_extension_protocol_options=_http(
            HttpProtocolOptionsExplicitHttpConfig(http_protocol_options=Http1ProtocolOptions()),
            idle=timedelta(seconds=config.upstream_idle_timeout_s),
        ),
    )


def _ext_proc_cluster(config: EnvoyConfig) -> Cluster:
    # With one host and no panic routing an unhealthy picker fails at once, which is what lets fail-open act at once.
    check = HealthCheck(
        timeout=timedelta(seconds=1),
        interval=timedelta(seconds=1),
        no_traffic_interval=timedelta(seconds=1),
        # A picker that comes back is asked again at once.
        unhealthy_interval=timedelta(milliseconds=200),
        unhealthy_threshold=2,
        healthy_threshold=1,
        grpc_health_check=HealthCheckGrpcHealthCheck(service_name=HEALTH_NAME),
    )
    cluster = _picker_cluster(EXT_PROC_CLUSTER, config, config.ext_proc_port, health_port=config.eds_port)
    cluster.health_checks = [check]
    cluster.common_lb_config = ClusterCommonLbConfig(healthy_panic_threshold=Percent(value=0.0))
    return cluster


def _eds_cluster(config: EnvoyConfig) -> Cluster:
    return _picker_cluster(EDS_CLUSTER, config, config.eds_port)


def _picker_cluster(name: str, config: EnvoyConfig, port: int, *, health_port: int | None = None) -> Cluster:
    """An HTTP/2 cluster with one address, a port of the picker; its health may be asked on another port."""
    check = None if health_port is None else EndpointHealthCheckConfig(port_value=health_port)
    endpoint = LbEndpoint(
        endpoint=Endpoint(address=_address(config.epp_host, port), health_check_config=check)
    )
    return Cluster(
        name=name,
        type=ClusterDiscoveryType.STATIC if _is_ip(config.epp_host) else ClusterDiscoveryType.STRICT_DNS,
        connect_timeout=timedelta(milliseconds=250),
        load_assignment=ClusterLoadAssignment(
            cluster_name=name, endpoints=[LocalityLbEndpoints(lb_endpoints=[endpoint])]
        ),
        circuit_breakers=_circuit_breakers(),
        typed_extension_protocol_options=_http(
            HttpProtocolOptionsExplicitHttpConfig(http2_protocol_options=Http2ProtocolOptions())
        ),
    )


def _policy(name: str, message: betterproto2.Message) -> LoadBalancingPolicy:
    typed = TypedExtensionConfig(name=f"envoy.load_balancing_policies.{name}", typed_config=Any.pack(message))
    return LoadBalancingPolicy(policies=[LoadBalancingPolicyPolicy(typed_extension_config=typed)])


def _http(
    explicit: HttpProtocolOptionsExplicitHttpConfig, *, idle: timedelta | None = None
) -> dict[str, Any]:
    common = None if idle is None else HttpProtocolOptions(idle_timeout=idle)
    options = UpstreamHttpOptions(explicit_http_config=explicit, common_http_protocol_options=common)
    return {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": Any.pack(options)}


def _circuit_breakers() -> CircuitBreakers:
    limits = CircuitBreakersThresholds(
        max_connections=_MAX_CONCURRENT,
        max_pending_requests=_MAX_CONCURRENT,
        max_requests=_MAX_CONCURRENT,
        max_retries=_MAX_CONCURRENT,
    )
    return CircuitBreakers(thresholds=[limits])


def _address(host: str, port: int) -> Address:
    return Address(socket_address=SocketAddress(address=host, port_value=port))


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
