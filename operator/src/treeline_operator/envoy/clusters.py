"""The clusters: the engines, and the picker's two ports."""

from __future__ import annotations

import ipaddress
from datetime import timedelta

import betterproto2
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
from envoy_data_plane.envoy.config.core.v3 import (
    ApiConfigSource,
    ApiConfigSourceApiType,
    ApiVersion,
    BackoffStrategy,
    ConfigSource,
    GrpcService,
    GrpcServiceEnvoyGrpc,
    HealthCheck,
    HealthCheckGrpcHealthCheck,
    Http1ProtocolOptions,
    Http2ProtocolOptions,
    HttpProtocolOptions,
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
from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host.v3 import (
    OverrideHost,
    OverrideHostOverrideHostSource,
)
from envoy_data_plane.envoy.extensions.load_balancing_policies.round_robin.v3 import RoundRobin
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import HttpProtocolOptions as UpstreamHttpOptions
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import HttpProtocolOptionsExplicitHttpConfig
from envoy_data_plane.envoy.type.metadata.v3 import MetadataKey, MetadataKeyPathSegment
from envoy_data_plane.envoy.type.v3 import Percent
from envoy_data_plane.google.protobuf import Any
from treeline_wire import headers

from treeline_operator.envoy.config import (
    ADMIN_CLUSTER,
    EDS_CLUSTER,
    EXT_PROC_CLUSTER,
    HEALTH_NAME,
    PODS_CLUSTER,
    EnvoyConfig,
    address,
)

# A stream on the ext_proc cluster and a request on the pods cluster may live for a whole generation; Envoy's default of
# 1024 would turn the 1025th concurrent generation into an error.
_MAX_CONCURRENT = 65_536


def pods_cluster(config: EnvoyConfig) -> Cluster:
    """The engines: known by EDS, chosen by the picker's word, else in turns."""

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
        common_lb_config=_balancing(),
        circuit_breakers=_circuit_breakers(),
        typed_extension_protocol_options=_http(
            HttpProtocolOptionsExplicitHttpConfig(http_protocol_options=Http1ProtocolOptions()),
            idle=timedelta(seconds=config.upstream_idle_timeout_s),
        ),
    )


def ext_proc_cluster(config: EnvoyConfig) -> Cluster:
    """The picker's ext_proc port; its health is asked on the port that also serves EDS."""
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
    return _picker_cluster(EXT_PROC_CLUSTER, config, config.ext_proc_port, check)


def eds_cluster(config: EnvoyConfig) -> Cluster:
    """The picker's EDS port."""
    return _picker_cluster(EDS_CLUSTER, config, config.eds_port)


def admin_cluster(config: EnvoyConfig) -> Cluster:
    """Envoy's own admin page, for the health listener."""
    endpoint = Endpoint(address=address("127.0.0.1", config.admin_port))
    return Cluster(
        name=ADMIN_CLUSTER,
        type=ClusterDiscoveryType.STATIC,
        connect_timeout=timedelta(milliseconds=250),
        load_assignment=_one_host(ADMIN_CLUSTER, endpoint),
    )


def _picker_cluster(name: str, config: EnvoyConfig, port: int, check: HealthCheck | None = None) -> Cluster:
    """An HTTP/2 cluster with one address, a port of the picker; its health is asked on the EDS port."""
    endpoint = Endpoint(
        address=address(config.epp_host, port),
        health_check_config=EndpointHealthCheckConfig(port_value=config.eds_port),
    )
    return Cluster(
        name=name,
        type=ClusterDiscoveryType.STATIC if _is_ip(config.epp_host) else ClusterDiscoveryType.STRICT_DNS,
        connect_timeout=timedelta(milliseconds=250),
        load_assignment=_one_host(name, endpoint),
        health_checks=[] if check is None else [check],
        common_lb_config=_balancing(),
        circuit_breakers=_circuit_breakers(),
        typed_extension_protocol_options=_http(
            HttpProtocolOptionsExplicitHttpConfig(http2_protocol_options=Http2ProtocolOptions())
        ),
    )


def _one_host(cluster: str, endpoint: Endpoint) -> ClusterLoadAssignment:
    locality = LocalityLbEndpoints(lb_endpoints=[LbEndpoint(endpoint=endpoint)])
    return ClusterLoadAssignment(cluster_name=cluster, endpoints=[locality])


def _policy(name: str, message: betterproto2.Message) -> LoadBalancingPolicy:
    typed = TypedExtensionConfig(name=f"envoy.load_balancing_policies.{name}", typed_config=Any.pack(message))
    return LoadBalancingPolicy(policies=[LoadBalancingPolicyPolicy(typed_extension_config=typed)])


def _http(
    explicit: HttpProtocolOptionsExplicitHttpConfig, *, idle: timedelta | None = None
) -> dict[str, Any]:
    common = None if idle is None else HttpProtocolOptions(idle_timeout=idle)
    options = UpstreamHttpOptions(explicit_http_config=explicit, common_http_protocol_options=common)
    return {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": Any.pack(options)}


def _balancing() -> ClusterCommonLbConfig:
    return ClusterCommonLbConfig(
        # Never spread requests over hosts known to be bad or draining, even if most are.
        healthy_panic_threshold=Percent(value=0.0),
        # Workers hear of a changed health at once. By default changes are merged for a second, so that a picker that is
        # back stays unused for that long, and a draining endpoint used.
        update_merge_window=timedelta(0),
    )


def _circuit_breakers() -> CircuitBreakers:
    limits = CircuitBreakersThresholds(
        max_connections=_MAX_CONCURRENT,
        max_pending_requests=_MAX_CONCURRENT,
        max_requests=_MAX_CONCURRENT,
        max_retries=_MAX_CONCURRENT,
    )
    return CircuitBreakers(thresholds=[limits])


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
