"""The dashboard of our Envoys: what clients see of a gateway, whether pickers answer, whether endpoints do."""

from __future__ import annotations

from typing import Final

from treeline_tools.boards.base import PROCESS, Board, Panel, Query, heatmap, processes, quantile, rate, stat

_CLIENTS: Final = f'{PROCESS}, envoy_http_conn_manager_prefix="gateway"'
_PODS: Final = f'{PROCESS}, envoy_cluster_name="pods"'
_BOTH: Final = f'{PROCESS}, envoy_cluster_name=~"pods|ext_proc"'
_HTTP: Final = "envoy_http_"
_ANSWERS: Final = f"{_HTTP}downstream_rq_xx"
_ERRORS: Final = f'{_CLIENTS}, envoy_response_code_class="5"'
_CLUSTER: Final = "envoy_cluster_"

BOARD: Final = Board(
    "treeline-gateway",
    "Treeline / Gateway",
    processes(f"{_HTTP}ext_proc_streams_started"),
    {
        "Now": (
            stat("Requests a second", "reqps", rate(_ANSWERS, selected=_CLIENTS)),
            stat(
                "Server errors",
                "percentunit",
                f"{rate(_ANSWERS, selected=_ERRORS)} / ({rate(_ANSWERS, selected=_CLIENTS)} > 0)",
                "Share of the answers with a status of 500 and more.",
                alarm=0.05,
            ),
            stat("Open requests", "short", f"sum({_HTTP}downstream_rq_active{{{_CLIENTS}}})"),
            stat("Median duration", "ms", quantile(0.5, f"{_HTTP}downstream_rq_time", selected=_CLIENTS)),
            stat("Endpoints that may be used", "short", f"max({_CLUSTER}membership_healthy{{{_PODS}}})"),
            stat(
                "Requests without a picker",
                "reqps",
                rate(f"{_HTTP}ext_proc_failure_mode_allowed", selected=_CLIENTS),
                "A second. They go to any endpoint, because no picker answers.",
                alarm=0.01,
            ),
        ),
        "Clients": (
            Panel(
                "Answers",
                "reqps",
                (
                    Query(
                        rate(_ANSWERS, "envoy_response_code_class", _CLIENTS),
                        "{{envoy_response_code_class}}xx",
                    ),
                ),
                "By the first digit of the status.",
                stacked=True,
            ),
            heatmap(
                "How long requests took",
                "ms",
                f"{_HTTP}downstream_rq_time",
                "To the end of the answer: a long output takes long.",
                _CLIENTS,
            ),
            Panel(
                "Open requests and connections",
                "short",
                (
                    Query(f"sum({_HTTP}downstream_rq_active{{{_CLIENTS}}})", "requests"),
                    Query(f"sum({_HTTP}downstream_cx_active{{{_CLIENTS}}})", "connections"),
                ),
            ),
        ),
        "Pickers": (
            Panel(
                "Requests to pickers",
                "reqps",
                (
                    Query(rate(f"{_HTTP}ext_proc_streams_started", selected=_CLIENTS), "asked"),
                    Query(rate(f"{_HTTP}ext_proc_immediate_responses_sent", selected=_CLIENTS), "refused"),
                ),
            ),
            Panel(
                "Requests that no picker answered",
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
                "Endpoints that Envoy knows",
                "short",
                (
                    Query(f"max({_CLUSTER}membership_total{{{_PODS}}})", "known"),
                    Query(f"max({_CLUSTER}membership_healthy{{{_PODS}}})", "may be used"),
                ),
            ),
            Panel(
                "Retries",
                "reqps",
                (
                    Query(rate(f"{_CLUSTER}upstream_rq_retry", selected=_PODS), "tried again"),
                    Query(rate(f"{_CLUSTER}upstream_rq_retry_success", selected=_PODS), "tried again and answered"),
                    Query(rate(f"{_CLUSTER}upstream_cx_connect_fail", selected=_PODS), "connections that failed"),
                ),
            ),
            Panel(
                "Memory used",
                "percent",
                (Query(f"envoy_overload_envoy_resource_monitors_fixed_heap_pressure{{{PROCESS}}}", "{{pod}}"),),
                "Of what an Envoy may use. Near 100 % it refuses requests.",
            ),
        ),
    },
)
