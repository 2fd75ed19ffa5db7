"""Envoy's own metrics that dashboards and alerts use. A test looks for them in a real Envoy."""

from __future__ import annotations

from typing import Final

from treeline_tools.metrics import Family

_CLIENTS: Final = "envoy_http_conn_manager_prefix"
_CLUSTER: Final = "envoy_cluster_name"

FAMILIES: Final = (
    Family("envoy_cluster_membership_healthy", "gauge", (_CLUSTER,), "Endpoints of a cluster that Envoy may use."),
    Family("envoy_cluster_membership_total", "gauge", (_CLUSTER,), "Endpoints of a cluster."),
    Family("envoy_cluster_upstream_cx_connect_fail", "counter", (_CLUSTER,), "Connections that could not be opened."),
    Family(
        "envoy_cluster_upstream_rq_pending_overflow",
        "counter",
        (_CLUSTER,),
        "Requests refused because too many were open already (circuit breaker).",
    ),
    Family("envoy_cluster_upstream_rq_retry", "counter", (_CLUSTER,), "Requests that were tried again."),
    Family(
        "envoy_cluster_upstream_rq_retry_success",
        "counter",
        (_CLUSTER,),
        "Requests that were tried again and then answered.",
    ),
    Family("envoy_http_downstream_cx_active", "gauge", (_CLIENTS,), "Open connections of clients."),
    Family(
        "envoy_http_downstream_rq_active",
        "gauge",
        (_CLIENTS,),
        "Requests of clients that have no complete response yet.",
    ),
    Family(
        "envoy_http_downstream_rq_time",
        "histogram",
        (_CLIENTS,),
        "Milliseconds from the start of a request to the end of its response.",
    ),
    Family(
        "envoy_http_downstream_rq_xx",
        "counter",
        ("envoy_response_code_class", _CLIENTS),
        "Responses to clients, by the first digit of their status.",
    ),
    Family(
        "envoy_http_ext_proc_failure_mode_allowed",
        "counter",
        (_CLIENTS,),
        "Requests that went on without a picker because none answered.",
    ),
    Family("envoy_http_ext_proc_immediate_responses_sent", "counter", (_CLIENTS,), "Requests that a picker refused."),
    Family("envoy_http_ext_proc_message_timeouts", "counter", (_CLIENTS,), "Messages that a picker did not answer."),
    Family("envoy_http_ext_proc_streams_failed", "counter", (_CLIENTS,), "ext_proc streams to a picker that failed."),
    Family(
        "envoy_http_ext_proc_streams_started",
        "counter",
        (_CLIENTS,),
        "ext_proc streams to a picker that were opened, one per request.",
    ),
    Family(
        "envoy_overload_envoy_resource_monitors_fixed_heap_pressure",
        "gauge",
        (),
        "Percent of the memory limit that this Envoy uses.",
    ),
)
