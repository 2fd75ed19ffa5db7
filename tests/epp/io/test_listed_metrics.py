"""The metrics that pickers show at /metrics are those listed in docs/metrics.md."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
from support.epp_io import RunningPicker, data_plane, engines, running_picker
from support.http import client
from support.kube_api import PODS, POOLS, fake_api, own_pool, pod
from support.metrics_page import compare
from treeline_tools import envoy_metrics, metrics

LISTED = metrics.families()["picker"]
ASKED_FOR = tuple(f"treeline_epp_{word}" for word in ("kube_", "flow_", "peer"))
"""Metrics that a picker has only on Kubernetes, or with a flag; their own tests check them."""


async def page_of(picker: RunningPicker) -> str:
    async with client(timeout=60) as http:
        answer: httpx.Response = await http.get(f"http://127.0.0.1:{picker.options.metrics_port}/metrics")
    return answer.text


def check_envoy(page: str) -> None:
    """Check that Envoy's page has the metrics that dashboards and alerts use, for our listener and clusters."""
    kinds = dict(re.findall(r"^# TYPE (\S+) (\w+)$", page, re.MULTILINE))
    for family in envoy_metrics.FAMILIES:
        assert kinds.get(family.name) == family.kind, family.name
        series = [
            dict(re.findall(r'(\w+)="([^"]*)"', line))
            for name in family.series
            for line in re.findall(rf"^{name}\{{(.*)\}} ", page, re.MULTILINE)
        ]
        assert all(set(labels) - {"le"} == set(family.labels) for labels in series), family.name
        if "envoy_cluster_name" in family.labels:
            assert {"pods", "ext_proc"} <= {labels["envoy_cluster_name"] for labels in series}, family.name
        if "envoy_http_conn_manager_prefix" in family.labels:
            assert "gateway" in {labels["envoy_http_conn_manager_prefix"] for labels in series}, family.name
        if "envoy_response_code_class" in family.labels:
            assert set("12345") == {labels["envoy_response_code_class"] for labels in series}


async def test_metrics_of_a_picker_and_its_envoy_equal_the_page(tmp_path: Path) -> None:
    async with engines() as fakes, data_plane(tmp_path, fakes) as plane:
        assert (await plane.complete()).status_code == 200
        assert (await plane.complete(model="nobody's")).status_code == 404
        absent = compare(await page_of(plane.picker), LISTED)
        page = (await plane.http.get(f"{plane.envoy.admin}/stats/prometheus")).text
    check_envoy(page)
    rest = {name for name in absent if not name.startswith(ASKED_FOR)}
    assert rest == {
        "treeline_epp_kv_subscription_events_total",  # no engine publishes
        "treeline_epp_rejected_total",
    }


async def test_metrics_of_a_picker_on_kubernetes_equal_the_page(tmp_path: Path) -> None:
    async with fake_api() as api, engines(1) as fakes:
        api.collection(POOLS.format("team")).put(own_pool("p0", port=fakes[0].port))
        api.collection(PODS.format("team")).put(pod("pod-0", labels={"treeline.dev/pool": "p0"}, ip="127.0.0.1"))
        flags = ("--kubeconfig", str(api.kubeconfig(tmp_path)), "--pool-namespace", "team", "--gateway", "treeline")
        async with running_picker(*flags) as picker:
            absent = compare(await page_of(picker), LISTED)
    assert {name for name in absent if "kube" in name} == set(), "InferenceModels are not there, which is told too"
