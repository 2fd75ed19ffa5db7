"""The clusters: the engines, and the picker's two ports."""

from __future__ import annotations

import ipaddress
from datetime import timedelta

import betterproto2
from envoy_data_plane.envoy.config.cluster import v3 as cluster_v3
from envoy_data_plane.envoy.config.core import v3 as core_v3
from envoy_data_plane.envoy.config.core.v3 import RetryPolicy as StreamRetryPolicy
from envoy_data_plane.envoy.config.endpoint import v3 as endpoint_v3
from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host import v3 as override_v3
from envoy_data_plane.envoy.extensions.load_balancing_policies.round_robin.v3 import RoundRobin
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import HttpProtocolOptions as UpstreamHttpOptions
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import HttpProtocolOptionsExplicitHttpConfig
from envoy_data_plane.envoy.type.metadata.v3 import MetadataKey, MetadataKeyPathSegment
from envoy_data_plane.envoy.type.v3 import Percent
from envoy_data_plane.google.protobuf import Any
from treeline_wire import headers

from treeline_operator.envoy.config import (
    ADMIN_CLUSTER,
    COLLECTOR_CLUSTER,
    EDS_CLUSTER,
    EXT_PROC_CLUSTER,
    HEALTH_NAME,
    PODS_CLUSTER,
    EnvoyConfig,
    address,
)
from treeline_operator.envoy.tls import to_picker

# A stream on the ext_proc cluster and a request on the pods cluster may live for a whole generation; Envoy's default of
# 1024 would turn the 1025th concurrent generation into an error.
_MAX_CONCURRENT = 65_536
# Frames that wait until a picker reads on; with more Envoy ends the connection that all clients share. A request that a
# client gives up leaves its reset (a control frame) and up to 60 KiB of headers: half a gigabyte of them at most, where
# Envoy's own 1,000 resets are sent within a second.
_RESETS_WAITING = 8192


def pods_cluster(config: EnvoyConfig) -> cluster_v3.Cluster:
    """The engines: known by EDS, chosen by the picker's word, else in turns."""

    def key(name: str) -> MetadataKey:
        return MetadataKey(key=headers.LB, path=[MetadataKeyPathSegment(key=name)])

    override = override_v3.OverrideHost(
        override_host_sources=[
            override_v3.OverrideHostOverrideHostSource(header=headers.DESTINATION),
            override_v3.OverrideHostOverrideHostSource(metadata=key(headers.DESTINATION)),
        ],
        # So the picker sees, with the response headers, which host really served.
        selected_host_key=key(headers.SERVED),
        fallback_policy=_policy("round_robin", RoundRobin()),
    )
    # How soon the stream is opened again after the picker was away; Envoy's own bounds are 0.5 s to 30 s.
    back_off = core_v3.BackoffStrategy(base_interval=timedelta(milliseconds=100), max_interval=timedelta(seconds=1))
    retry = StreamRetryPolicy(retry_back_off=back_off)
    source = core_v3.ApiConfigSource(
        api_type=core_v3.ApiConfigSourceApiType.GRPC,
        transport_api_version=core_v3.ApiVersion.V3,
        grpc_services=[
            core_v3.GrpcService(envoy_grpc=core_v3.GrpcServiceEnvoyGrpc(cluster_name=EDS_CLUSTER, retry_policy=retry))
        ],
        set_node_on_first_message_only=True,
    )
    eds = core_v3.ConfigSource(
        api_config_source=source,
        resource_api_version=core_v3.ApiVersion.V3,
        # How long the listener waits for endpoints at start, should the picker be away.
        initial_fetch_timeout=timedelta(seconds=5),
    )
    return cluster_v3.Cluster(
        name=PODS_CLUSTER,
        type=cluster_v3.ClusterDiscoveryType.EDS,
        eds_cluster_config=cluster_v3.ClusterEdsClusterConfig(eds_config=eds, service_name=PODS_CLUSTER),
        connect_timeout=timedelta(seconds=config.connect_timeout_s),
        load_balancing_policy=_policy("override_host", override),
        common_lb_config=_balancing(),
        circuit_breakers=_circuit_breakers(),
        typed_extension_protocol_options=_http(
            HttpProtocolOptionsExplicitHttpConfig(http_protocol_options=core_v3.Http1ProtocolOptions()),
            idle=timedelta(seconds=config.upstream_idle_timeout_s),
        ),
    )


def ext_proc_cluster(config: EnvoyConfig) -> cluster_v3.Cluster:
    """The picker's ext_proc port; its health is asked on the port that also serves EDS."""
    # With one host and no panic routing an unhealthy picker fails at once, which is what lets fail-open act at once.
    check = core_v3.HealthCheck(
        timeout=timedelta(seconds=1),
        interval=timedelta(seconds=1),
        no_traffic_interval=timedelta(seconds=1),
        # A picker that comes back is asked again at once.
        unhealthy_interval=timedelta(milliseconds=200),
        unhealthy_threshold=2,
        healthy_threshold=1,
        grpc_health_check=core_v3.HealthCheckGrpcHealthCheck(service_name=HEALTH_NAME),
    )
    return _picker_cluster(EXT_PROC_CLUSTER, config, config.ext_proc_port, check)


def eds_cluster(config: EnvoyConfig) -> cluster_v3.Cluster:
    """The picker's EDS port."""
    return _picker_cluster(EDS_CLUSTER, config, config.eds_port)


def admin_cluster(config: EnvoyConfig) -> cluster_v3.Cluster:
    """Envoy's own admin page, for the health listener."""
    assert config.admin_port is not None  # EnvoyConfig sees to it
    endpoint = endpoint_v3.Endpoint(address=address("127.0.0.1", config.admin_port))
    return cluster_v3.Cluster(
        name=ADMIN_CLUSTER,
        type=cluster_v3.ClusterDiscoveryType.STATIC,
        connect_timeout=timedelta(milliseconds=250),
        load_assignment=_one_host(ADMIN_CLUSTER, endpoint),
    )


def _picker_cluster(
    name: str, config: EnvoyConfig, port: int, check: core_v3.HealthCheck | None = None
) -> cluster_v3.Cluster:
    """An HTTP/2 cluster with one address, a port of the picker; its health is asked on the EDS port."""
    endpoint = endpoint_v3.Endpoint(
        address=address(config.epp_host, port),
        health_check_config=endpoint_v3.EndpointHealthCheckConfig(port_value=config.eds_port),
    )
    return cluster_v3.Cluster(
        name=name,
        type=_by_name(config.epp_host),
        connect_timeout=timedelta(milliseconds=250),
        load_assignment=_one_host(name, endpoint),
        health_checks=[] if check is None else [check],
        common_lb_config=_balancing(),
        circuit_breakers=_circuit_breakers(),
        transport_socket=to_picker(config.picker_tls),
        typed_extension_protocol_options=_http2(),
    )


def collector_cluster(config: EnvoyConfig) -> list[cluster_v3.Cluster]:
    """Where spans go, if anywhere: OTLP over gRPC, in plain text."""
    asked = config.tracing
    if asked is None:
        return []
    endpoint = endpoint_v3.Endpoint(address=address(asked.host, asked.port))
    cluster = cluster_v3.Cluster(
        name=COLLECTOR_CLUSTER,
        type=_by_name(asked.host),
        dns_lookup_family=cluster_v3.ClusterDnsLookupFamily.ALL,  # `localhost` is two addresses, and it may have one
        connect_timeout=timedelta(seconds=config.connect_timeout_s),
        load_assignment=_one_host(COLLECTOR_CLUSTER, endpoint),
        typed_extension_protocol_options=_http2(),
    )
    return [cluster]


def _one_host(cluster: str, endpoint: endpoint_v3.Endpoint) -> endpoint_v3.ClusterLoadAssignment:
    locality = endpoint_v3.LocalityLbEndpoints(lb_endpoints=[endpoint_v3.LbEndpoint(endpoint=endpoint)])
    return endpoint_v3.ClusterLoadAssignment(cluster_name=cluster, endpoints=[locality])


def _policy(name: str, message: betterproto2.Message) -> cluster_v3.LoadBalancingPolicy:
    typed = core_v3.TypedExtensionConfig(name=f"envoy.load_balancing_policies.{name}", typed_config=Any.pack(message))
    return cluster_v3.LoadBalancingPolicy(policies=[cluster_v3.LoadBalancingPolicyPolicy(typed_extension_config=typed)])


def _http2() -> dict[str, Any]:
    options = core_v3.Http2ProtocolOptions(
        max_outbound_control_frames=_RESETS_WAITING, max_outbound_frames=_MAX_CONCURRENT
    )
    return _http(HttpProtocolOptionsExplicitHttpConfig(http2_protocol_options=options))


def _http(explicit: HttpProtocolOptionsExplicitHttpConfig, *, idle: timedelta | None = None) -> dict[str, Any]:
    common = None if idle is None else core_v3.HttpProtocolOptions(idle_timeout=idle)
    options = UpstreamHttpOptions(explicit_http_config=explicit, common_http_protocol_options=common)
    return {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": Any.pack(options)}


def _balancing() -> cluster_v3.ClusterCommonLbConfig:
    return cluster_v3.ClusterCommonLbConfig(
        # Never spread requests over hosts known to be bad or draining, even if most are.
        healthy_panic_threshold=Percent(value=0.0),
        # Workers hear of a changed health at once. By default changes are merged for a second, so that a picker that is
        # back stays unused for that long, and a draining endpoint used.
        update_merge_window=timedelta(0),
    )


def _circuit_breakers() -> cluster_v3.CircuitBreakers:
    limits = cluster_v3.CircuitBreakersThresholds(
        max_connections=_MAX_CONCURRENT,
        max_pending_requests=_MAX_CONCURRENT,
        max_requests=_MAX_CONCURRENT,
        max_retries=_MAX_CONCURRENT,
    )
    return cluster_v3.CircuitBreakers(thresholds=[limits])


def _by_name(host: str) -> cluster_v3.ClusterDiscoveryType:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return cluster_v3.ClusterDiscoveryType.STRICT_DNS
    return cluster_v3.ClusterDiscoveryType.STATIC
