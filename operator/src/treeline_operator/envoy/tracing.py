"""Envoy's own spans: of a request, of the picker's call and of each attempt at an endpoint, for one trace of them all.

Envoy writes the span of an attempt into the request that it sends, over whatever the picker has set there; the picker
learns of Envoy's spans by the call's metadata. So `ingress` has the picker's spans under its call, and a runtime's
under the attempt that reached it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from envoy_data_plane.envoy.config.core import v3 as core_v3
from envoy_data_plane.envoy.config.trace.v3 import OpenTelemetryConfig, TracingHttp
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager import v3 as hcm_v3
from envoy_data_plane.envoy.extensions.request_id.uuid.v3 import UuidRequestIdConfig
from envoy_data_plane.envoy.type.tracing.v3 import CustomTag
from envoy_data_plane.envoy.type.v3 import Percent
from envoy_data_plane.google.protobuf import Any

from treeline_operator.envoy.config import COLLECTOR_CLUSTER, EnvoyConfig

SERVICE: Final = "treeline-edge"
_TIMEOUT = timedelta(seconds=1)


def spans(config: EnvoyConfig) -> hcm_v3.HttpConnectionManagerTracing | None:
    """What is traced, and where it is sent; None for nothing."""
    asked = config.tracing
    if asked is None:
        return None
    service = core_v3.GrpcService(
        envoy_grpc=core_v3.GrpcServiceEnvoyGrpc(cluster_name=COLLECTOR_CLUSTER), timeout=_TIMEOUT
    )
    tracer = OpenTelemetryConfig(grpc_service=service, service_name=SERVICE)
    return hcm_v3.HttpConnectionManagerTracing(
        provider=TracingHttp(name="envoy.tracers.opentelemetry", typed_config=Any.pack(tracer)),
        # Of requests that come without a trace; of the others their senders have decided.
        random_sampling=Percent(value=100 * asked.ratio),
        spawn_upstream_span=True,
        # As in the access log, a query string is not repeated.
        custom_tags=[CustomTag(tag="http.url", value="%PATH(NQ)%")],
    )


def request_ids(config: EnvoyConfig) -> hcm_v3.RequestIdExtension | None:
    """By default Envoy notes in a request's id whether it is traced: a client's own id stays what it is."""
    if config.tracing is None:
        return None
    plain = UuidRequestIdConfig(pack_trace_reason=False, use_request_id_for_trace_sampling=False)
    return hcm_v3.RequestIdExtension(typed_config=Any.pack(plain))
