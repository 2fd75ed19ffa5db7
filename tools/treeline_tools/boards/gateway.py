"""The dashboard of our Envoys: what clients see of a gateway, whether pickers answer, whether endpoints do."""

from __future__ import annotations

from typing import Final

from treeline_tools.boards.base import HERE, SELECTED, Board, Panel, Query, quantiles, rate

_CLIENTS: Final = f'{SELECTED}, envoy_http_conn_manager_prefix="gateway"'
_PODS: Final = f'{SELECTED}, envoy_cluster_name="pods"'
_BOTH: Final = f'{SELECTED}, envoy_cluster_name=~"pods|ext_proc"'
_HTTP: Final = "envoy_http_"
_CLUSTER: Final = "envoy_cluster_"

BOARD: Final = Board(
    "treeline-gateway",
    "Treeline / Gateway",
    f"{_HTTP}ext_proc_streams_started",
    {
        "Clients": (
            Panel(
                "Answers",
                "reqps",
                (
                    Query(
                        rate(f"{_HTTP}downstream_rq_xx", "envoy_response_code_class", _CLIENTS),
                        "{{envoy_response_code_class}}xx",
                    ),
                ),
                "By the first digit of the status.",
                stacked=True,
            ),
            Panel(
                "How long requests took",
                "ms",
                quantiles(f"{_HTTP}downstream_rq_time", selected=_CLIENTS),
                "To the end of the answer: a generation takes as long as it has tokens.",
            ),
            Panel(
                "Open",
                "short",
                (
                    Query(f"sum({_HTTP}downstream_rq_active{{{_CLIENTS}}})", "requests"),
                    Query(f"sum({_HTTP}downstream_cx_active{{{_CLIENTS}}})", "connections"),
                ),
            ),
        ),
        "Pickers": (
            Panel(
                "Asked",
                "reqps",
                (
                    Query(rate(f"{_HTTP}ext_proc_streams_started", selected=_CLIENTS), "asked"),
                    Query(rate(f"{_HTTP}ext_proc_immediate_responses_sent", selected=_CLIENTS), "refused"),
                ),
            ),
            Panel(
                "Not answered",
                "reqps",
                (
                    Query(rate(f"{_HTTP}ext_proc_failure_mode_allowed", selected=_CLIENTS), "went on without a picker"),
                    Query(rate(f"{_HTTP}ext_proc_streams_failed", selected=_CLIENTS), "streams that failed"),
                    Query(rate(f"{_HTTP}ext_proc_message_timeouts", selected=_CLIENTS), "messages without an answer"),
                ),
                "Requests without a picker go to any endpoint, or are refused, as the pool's failure mode says.",
            ),
            Panel(
                "Refused by circuit breakers",
                "reqps",
                (
                    Query(
                        rate(f"{_CLUSTER}upstream_rq_pending_overflow", "envoy_cluster_name", _BOTH),
                        "{{envoy_cluster_name}}",
                    ),
                ),
            ),
        ),
        "Endpoints": (
            Panel(
                "Known",
                "short",
                (
                    Query(f"max({_CLUSTER}membership_total{{{_PODS}}})", "known"),
                    Query(f"max({_CLUSTER}membership_healthy{{{_PODS}}})", "may be used"),
                ),
            ),
            Panel(
                "Tried again",
                "reqps",
                (
                    Query(rate(f"{_CLUSTER}upstream_rq_retry", selected=_PODS), "tried again"),
                    Query(rate(f"{_CLUSTER}upstream_rq_retry_success", selected=_PODS), "and answered"),
                    Query(rate(f"{_CLUSTER}upstream_cx_connect_fail", selected=_PODS), "connections that failed"),
                ),
            ),
            Panel(
                "Memory that an Envoy may use",
                "percent",
                (Query(f"envoy_overload_envoy_resource_monitors_fixed_heap_pressure{HERE}", "{{pod}}"),),
                "Near its end requests are refused.",
            ),
        ),
    },
)
