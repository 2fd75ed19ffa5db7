"""The alerts fire when they should, and only then, by Prometheus' own promtool."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import helm
from support.control_plane import programs_or_skip

pytestmark = pytest.mark.deep

ALERTS = helm.CHART / "files" / "alerts.yaml"
NAMES = [rule["alert"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]

PICKER = 'namespace="a", job="a/picker", pod="p-0"'
ENGINE = 'namespace="a", job="a/pool", pod="e-0", model_name="m"'
OPERATOR = 'namespace="a", job="a/operator", pod="o-0"'
POOL = 'namespace="a", name="x", job="a/operator", pod="o-0", kind="InferencePool"'
MODEL = 'namespace="a", name="x", job="a/operator", pod="o-0", kind="InferenceModel"'
ENVOY = 'namespace="a", job="a/edge", pod="v-0", envoy_http_conn_manager_prefix="gateway"'
CLUSTER = 'namespace="a", job="a/edge", pod="v-0"'
E, R, O = "treeline_epp_", "treeline:", "treeline_operator_"  # noqa: E741

Series = dict[str, str]
"""Series → values, one a minute from 0: `5` stays, `0+2` grows by 2."""
ABSENT = ""

FIRING: dict[str, dict[str, tuple[str, str]]] = {
    "TreelineTargetDown": {
        f'up{{{PICKER}, treeline_component="epp"}}': ("0", "1"),
        'up{namespace="a", job="a/other", pod="x-0"}': (ABSENT, "0"),
    },
    "TreelineOperatorHasNoLeader": {
        f"{O}is_leader{{{OPERATOR}}}": ("0", "0"),
        f'{O}is_leader{{namespace="a", job="a/operator", pod="o-1"}}': (ABSENT, "1"),
    },
    "TreelinePoolNotReady": {
        f'{O}conditions{{{POOL}, type="Ready", status="False", reason="CrashLooping"}}': ("1", ABSENT),
        f'{O}conditions{{{POOL}, type="Ready", status="True", reason="Serving"}}': (ABSENT, "1"),
        f'{O}conditions{{{POOL}, type="Progressing", status="False", reason="Paused"}}': (ABSENT, "1"),
        f'{O}conditions{{{POOL}, type="Ready", status="False", reason="ScaledToZero"}}': (ABSENT, "1"),
        f'{O}conditions{{{POOL}, type="Ready", status="False", reason="Deleting"}}': (ABSENT, "1"),
    },
    "TreelineModelNotAccepted": {
        f'{O}conditions{{{MODEL}, type="Accepted", status="Unknown", reason="X"}}': ("1", ABSENT),
        f'{O}conditions{{{MODEL}, type="Accepted", status="True", reason="X"}}': (ABSENT, "1"),
    },
    "TreelineReconciliationsFail": {
        f'{O}retries_total{{{OPERATOR}, kind="pool"}}': ("0+6", "0+4"),
        f'{O}reconciles_total{{{OPERATOR}, kind="pool", result="ok"}}': ("0+4", "0+6"),
        f'{O}reconciles_total{{{OPERATOR}, kind="pool", result="conflict"}}': ("0+6", "0+4"),
    },
    "TreelineOperatorQueueStands": {f"{O}queue_oldest_seconds{{{OPERATOR}}}": ("400", "200")},
    "TreelineOperatorHearsNothing": {f'{O}watch_age_seconds{{{OPERATOR}, kind="pods"}}': ("0+60", "300")},
    "TreelineGatewayErrors": {
        f'envoy_http_downstream_rq_xx{{{ENVOY}, envoy_response_code_class="5"}}': ("0+10", "0+1"),
        f'envoy_http_downstream_rq_xx{{{ENVOY}, envoy_response_code_class="2"}}': ("0+100", "0+50"),
        f'envoy_http_downstream_rq_xx{{{ENVOY}, envoy_response_code_class="4"}}': (ABSENT, "0+50"),
    },
    "TreelineGatewayWithoutPicker": {
        f"envoy_http_ext_proc_failure_mode_allowed{{{ENVOY}}}": ("0+1", "9"),
        f"envoy_http_ext_proc_streams_failed{{{ENVOY}}}": ("0", "9"),
    },
    "TreelineGatewayFull": {
        f'envoy_cluster_upstream_rq_pending_overflow{{{CLUSTER}, envoy_cluster_name="ext_proc"}}': ("0+1", ABSENT),
        f'envoy_cluster_upstream_rq_pending_overflow{{{CLUSTER}, envoy_cluster_name="eds"}}': (ABSENT, "0+1"),
    },
    "TreelineGatewayMemoryShort": {
        f"envoy_overload_envoy_resource_monitors_fixed_heap_pressure{{{CLUSTER}}}": ("95", "50")
    },
    "TreelinePickerNotReady": {f"{E}extproc_ready{{{PICKER}}}": ("0", "1")},
    "TreelinePickerFails": {f"{E}internal_errors_total{{{PICKER}}}": ("0+1", "7")},
    "TreelineNoEndpoints": {
        f'{E}refusals_total{{{PICKER}, code="no_endpoints"}}': ("0+1", ABSENT),
        f'{E}refusals_total{{{PICKER}, code="model_not_found"}}': (ABSENT, "0+1"),
    },
    "TreelineSaturated": {
        f'{E}refusals_total{{{PICKER}, code="saturated"}}': ("0+10", "0+4"),
        f'{E}decisions_total{{{PICKER}, endpoint="e-0"}}': ("0+50", "0+100"),
        f'{E}decisions_total{{{PICKER}, endpoint="e-1"}}': ("0+50", ABSENT),
    },
    "TreelineEndpointsDown": {
        f'{E}endpoints{{{PICKER}, state="down"}}': ("1", "0"),
        f'{E}endpoints{{{PICKER}, state="ready"}}': (ABSENT, "3"),
    },
    "TreelineEndpointsFailing": {f"{E}endpoints_failing{{{PICKER}}}": ("1", "0")},
    "TreelineSubscriptionsBehind": {
        f'{E}kv_subscriptions{{{PICKER}, state="backoff"}}': ("2", "0"),
        f'{E}kv_subscriptions{{{PICKER}, state="live"}}': (ABSENT, "2"),
    },
    "TreelineEventsCannotBeFollowed": {f"{E}endpoints_unfollowed{{{PICKER}}}": ("1", "0")},
    "TreelineRoutedByHistory": {
        f'{E}endpoints_routed{{{PICKER}, pool="x", way="history", reason="NoTokenizer"}}': ("2", ABSENT),
        f'{E}endpoints_routed{{{PICKER}, pool="x", way="history", reason="NoEvents"}}': (ABSENT, "2"),
        f'{E}endpoints_routed{{{PICKER}, pool="y", way="events", reason=""}}': (ABSENT, "2"),
    },
    "TreelineHitsAreNotThere": {
        f"{E}predicted_hit_tokens_total{{{PICKER}}}": ("0+90000", "0+65000"),
        f"{E}reported_hit_tokens_total{{{PICKER}}}": ("0+60000", "0+60000"),
        f"{E}reported_prompt_tokens_total{{{PICKER}}}": ("0+100000", "0+100000"),
    },
    "TreelinePicksSlow": {
        f'{E}pick_seconds_bucket{{{PICKER}, le="0.1"}}': ("0+90", ABSENT),
        f'{E}pick_seconds_bucket{{{PICKER}, le="0.5"}}': ("0+100", ABSENT),
        f'{E}pick_seconds_bucket{{{PICKER}, le="+Inf"}}': ("0+100", "0+100"),
        f'{E}pick_seconds_bucket{{{PICKER}, le="0.001"}}': (ABSENT, "0+100"),
    },
    "TreelineEnvoyRejectsEndpoints": {f"{E}eds_rejections_total{{{PICKER}}}": ("0+1", "3")},
    "TreelinePickerHearsNothing": {f'{E}kube_watch_age_seconds{{{PICKER}, kind="pods"}}': ("0+60", "75")},
    "TreelineRequestsRejected": {
        f"{R}num_rejected_requests_total{{{ENGINE}}}": ("0+10", "0+1"),
        f"{R}num_requests_total{{{ENGINE}}}": ("0+100", "0+100"),
    },
    "TreelineServerErrors": {
        f'{R}http_responses_total{{{ENGINE}, path="/v1/completions", status="500"}}': ("0+1", ABSENT),
        f'{R}http_responses_total{{{ENGINE}, path="/v1/completions", status="503"}}': (ABSENT, "0+1"),
    },
    "TreelineQueueLong": {
        f"{R}num_queue_reqs{{{ENGINE}}}": ("6", "60"),
        f'{R}num_queue_reqs{{namespace="a", job="a/pool", pod="e-1", model_name="m"}}': (ABSENT, "0"),
    },
    "TreelineMemoryShort": {f"{R}num_retracted_requests_total{{{ENGINE}}}": ("0+12", "0+3")},
    "TreelineCacheWrong": {f'{R}cache_source_off{{{ENGINE}, source="tree"}}': ("1", "0")},
    "TreelineDrainsLong": {f"{R}draining{{{ENGINE}}}": ("1", "0")},
}
"""For each alert the series of a world in which it fires, and of a similar healthy one."""
GONE = "TreelineOperatorGone"
"""It fires if there are no series, so it has a world of its own; all others have an operator."""

MINUTES = 90


def promtool(*arguments: str) -> str:
    """Return promtool's output. Skips if it is not built."""
    program = programs_or_skip("promtool")["promtool"] / "promtool"
    done = subprocess.run([str(program), *arguments], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def plan(worlds: dict[str, Series], expected: dict[str, dict[str, int]]) -> dict[str, Any]:
    """Return one test for promtool: each world is a namespace of its own. `expected`: PromQL → labels found → value."""
    series = {
        name.replace('namespace="a"', f'namespace="{alert}"'): f"{value}x{MINUTES}"
        for alert, world in worlds.items()
        for name, value in world.items()
    }
    asked = [
        {
            "expr": expr,
            "eval_time": f"{MINUTES}m",
            "exp_samples": [{"labels": labels, "value": value} for labels, value in samples.items()],
        }
        for expr, samples in expected.items()
    ]
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": asked,
    }


def test_every_alert_is_tried():
    assert {*FIRING, GONE} == set(NAMES)


def test_promtool_accepts_the_rules():
    assert f"SUCCESS: {len(NAMES)} rules found" in promtool("check", "rules", "--lint=all", "--lint-fatal", str(ALERTS))


def test_each_alert_fires_in_trouble_and_none_in_a_healthy_world(tmp_path: Path):
    trouble, peace = (
        {alert: {name: told[at] for name, told in world.items() if told[at]} for alert, world in FIRING.items()}
        for at in (0, 1)
    )
    firing = {
        f'count(ALERTS{{alertname="{alert}", namespace="{alert}", alertstate="firing"}})': {"{}": 1} for alert in FIRING
    }
    alone = {
        f'ALERTS{{alertname="{GONE}", alertstate="firing"}}': {
            f'ALERTS{{alertname="{GONE}", alertstate="firing", severity="critical"}}': 1
        }
    }
    tests = [plan(trouble, firing), plan(peace, {"ALERTS": {}}), plan({}, alone)]
    written = tmp_path / "alerts.test.yaml"
    written.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests}))
    promtool("test", "rules", str(written))
