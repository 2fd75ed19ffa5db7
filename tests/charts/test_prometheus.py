"""A real Prometheus scrapes real pages by our monitors, and evaluates alerts and panels."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import promql_parser as promql
import pytest
import yaml
from support import helm
from support.control_plane import ROOT, programs_or_skip
from support.epp_io import data_plane, engines, until
from support.gateway_cluster import Cluster
from support.pool_world import a_pool, settled
from support.ports import free_port
from support.runtime_server import ServerProcess
from treeline_operator.controller.health import Pages, Vitals
from treeline_operator.controller.metrics import Metrics
from treeline_operator.controller.queue import Outcome
from treeline_operator.plan.objects import POD_MONITOR
from treeline_operator.world import Key, Platform, Ref
from treeline_tools import envoy_metrics, metrics

pytestmark = [pytest.mark.integration, pytest.mark.deep]

FILES = helm.CHART / "files"
GROUPS = yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]
PANELS = [
    re.sub(r"\$(namespace|pod|pool|model|name)\b", ".*", target["expr"].replace("$__rate_interval", "5m"))
    for path in sorted((FILES / "dashboards").glob("*.json"))
    for panel in json.loads(path.read_text())["panels"]
    for target in panel.get("targets", ())
]
FAMILIES = (
    {"up": metrics.Family("up", "gauge", ("treeline_component",), "")}
    | metrics.by_series()
    | {name: family for family in envoy_metrics.FAMILIES for name in family.series}
)
LABELS, INTERVAL = (("release", "prometheus"),), "1s"
PLATFORM = Platform(apis=frozenset({POD_MONITOR}), monitor_labels=LABELS, monitor_interval=INTERVAL)

NOTHING_TO_TELL = {
    "treeline:cache_source_off",
    "treeline_epp_client_prompt_tokens_total",
    "treeline_epp_form_predicted_seconds_total",
    "treeline_epp_form_seconds_total",
    "treeline_epp_kube_watch_age_seconds",
    "treeline_epp_rejected_total",
    "treeline_epp_served_by_other_total",
}
"""Metrics that exist only with audits of the cache, clients' keys, on Kubernetes, after the first error,
or after the first streamed answer."""


def monitors() -> dict[str, dict[str, Any]]:
    """Return each program's PodMonitor, as operator and chart make it."""
    cluster = Cluster()
    cluster.converge(a_pool("tiny"), platform=PLATFORM)
    children = settled(a_pool("tiny"), platform=PLATFORM).objects
    options = ("--set", f"metrics.podMonitor=true,metrics.interval={INTERVAL},metrics.monitorLabels.release=prometheus")
    chart = helm.render(*options, "--api-versions", "monitoring.coreos.com/v1/PodMonitor")
    return {
        "picker": cluster.get("PodMonitor", "treeline-epp"),
        "envoy": cluster.get("PodMonitor", "treeline-edge"),
        "runtime": next(obj for ref, obj in children.items() if ref.kind == "PodMonitor"),
        "operator": next(item for item in chart if item["kind"] == "PodMonitor"),
    }


def scrape(name: str, monitor: dict[str, Any], address: str) -> dict[str, Any]:
    """Return the job that the Prometheus operator makes of a monitor, with the labels that it gives to a pod's port."""
    (endpoint,), meta = monitor["spec"]["podMetricsEndpoints"], monitor["metadata"]
    given = {"namespace": meta["namespace"], "pod": f"{name}-0", "container": name, "endpoint": endpoint["port"]}
    job = f"{meta['namespace']}/{meta['name']}"
    return {
        "job_name": f"podMonitor/{job}/0",
        "honor_labels": endpoint.get("honorLabels", False),
        "scrape_interval": endpoint["interval"],
        "metrics_path": endpoint.get("path", "/metrics"),
        "relabel_configs": [
            {"target_label": one["targetLabel"], "replacement": one["replacement"]} for one in endpoint["relabelings"]
        ],
        "static_configs": [{"targets": [address], "labels": {**given, "job": job}}],
    }


@contextmanager
def prometheus(folder: Path, jobs: list[dict[str, Any]]) -> Iterator[str]:
    """Run a Prometheus with these jobs and our alerts, which fire at once. Yields its URL."""
    program = programs_or_skip("prometheus")["prometheus"] / "prometheus"
    hasty = [
        {**group, "rules": [{k: v for k, v in rule.items() if k != "for"} for rule in group["rules"]]}
        for group in GROUPS
    ]
    (folder / "alerts.yaml").write_text(yaml.safe_dump({"groups": hasty}))
    config = {"global": {"evaluation_interval": "1s"}, "rule_files": ["alerts.yaml"], "scrape_configs": jobs}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    flags = (f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data")
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen([program, *flags, f"--web.listen-address={address}"], stderr=log)
    try:
        yield f"http://{address}/api/v1"
    finally:
        process.kill()
        process.wait()


def operator_metrics() -> Metrics:
    """Return the metrics of an operator with one crashing, one sleeping and one healthy pool."""
    shown = Metrics()
    shown.leads(True)
    shown.finished(Key("pool", "team", "a"), Outcome(retry=True), 0.1, 0.2)
    shown.requested("get", "pods", 200, 0.1)
    shown.drifted("Deployment")
    shown.watch_ages = lambda: {"v1/Pod": 1.0}
    for name, status, reason in (
        ("crashes", "False", "CrashLooping"),
        ("asleep", "False", "ScaledToZero"),
        ("well", "True", "Serving"),
    ):
        ref = Ref("treeline.dev/v1alpha1", "InferencePool", "team", name)
        shown.conditions(ref, [{"type": "Ready", "status": status, "reason": reason}])
    return shown


@asynccontextmanager
async def programs_with_pages(folder: Path) -> AsyncIterator[tuple[dict[str, str], Pages]]:
    """Return the address of each program's page, after a few requests, and the operator's pages, to be closed."""
    health = free_port()
    pages = await Pages(Vitals(), operator_metrics()).open("127.0.0.1", 0, 0)
    async with engines() as fakes, data_plane(folder, fakes, health_port=health) as plane:
        assert (await plane.complete()).status_code == 200
        assert (await plane.complete(model="nobody's")).status_code == 404
        runtime = ServerProcess(ROOT / "models" / "tiny", fake=True)
        try:
            await asyncio.to_thread(runtime.ready)
            async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
                assert (await http.get(f"{runtime.url}/v1/models")).status_code == 200
            yield (
                {
                    "picker": f"127.0.0.1:{plane.picker.options.metrics_port}",
                    "envoy": f"127.0.0.1:{health}",
                    "runtime": urlsplit(runtime.metrics_url).netloc,
                    "operator": f"127.0.0.1:{pages.ports()[1]}",
                },
                pages,
            )
        finally:
            await asyncio.to_thread(runtime.stop)
            await pages.close()


def selected(expr: str) -> set[str]:
    """Return the series that a query names."""
    found: set[str] = set()

    def look(node: Any) -> None:
        if isinstance(node, promql.VectorSelector):
            found.add(str(node.name))
        elif isinstance(node, promql.MatrixSelector):
            look(node.vector_selector)
        for part in ("expr", "lhs", "rhs"):
            if (inner := getattr(node, part, None)) is not None:
                look(inner)
        for inner in getattr(node, "args", ()):
            look(inner)

    look(promql.parse(expr))
    return found


QUERIES = {*PANELS, *(rule["expr"] for group in GROUPS for rule in group["rules"])}


async def test_every_series_that_a_query_names_is_on_a_real_page(tmp_path: Path) -> None:
    labels: dict[str, set[str]] = {}
    async with programs_with_pages(tmp_path) as (addresses, _), httpx.AsyncClient(trust_env=False) as http:
        for address in addresses.values():
            page = (await http.get(f"http://{address}/metrics", timeout=60)).text
            for name, told in re.findall(r"^([a-z0-9_:]+)(?:\{(.*)\})? ", page, re.MULTILINE):
                labels.setdefault(name, set()).update(re.findall(r'(\w+)="', told))
    named = set().union(*map(selected, QUERIES)) - {"up"}
    assert named - labels.keys() == NOTHING_TO_TELL
    for name in named & labels.keys():
        assert set(FAMILIES[name].labels) <= labels[name], name


async def check_queries(ask: Callable[..., Any]) -> None:
    """Check that every query of panels and alerts runs, and that its metrics exist with their labels."""
    missing = set()
    for name in set().union(*map(selected, QUERIES)):
        series = await ask("series", **{"match[]": name})
        wanted = {*FAMILIES[name].labels, "namespace", "pod", "job"}
        assert all(wanted <= set(one) for one in series), name
        assert not any(label.startswith("exported_") for one in series for label in one), name
        missing |= set() if series else {name}
    assert missing == NOTHING_TO_TELL
    for query in QUERIES:
        await ask("query", query=query)  # a refusal fails


def test_the_chart_says_where_the_runbooks_are_published() -> None:
    urls = [rule["annotations"]["runbook_url"] for group in GROUPS for rule in group["rules"]]
    where = "metrics.prometheusRule=true,metrics.runbooks=https://docs.example/runbooks"
    items = helm.render("--set", where, "--api-versions", "monitoring.coreos.com/v1/PrometheusRule")
    rendered = next(item for item in items if item["kind"] == "PrometheusRule")["spec"]["groups"]
    told = [rule["annotations"]["runbook_url"] for group in rendered for rule in group["rules"]]
    assert told == [url.replace("docs/runbooks.md", "https://docs.example/runbooks") for url in urls]


def test_all_monitors_have_the_labels_and_the_interval_of_the_chart() -> None:
    for name, monitor in monitors().items():
        assert dict(LABELS).items() <= monitor["metadata"]["labels"].items(), name
        assert [one["interval"] for one in monitor["spec"]["podMetricsEndpoints"]] == [INTERVAL], name


async def test_prometheus_finds_the_metrics_of_alerts_and_panels_and_alerts_name_the_pool(tmp_path: Path) -> None:
    found = monitors()
    async with programs_with_pages(tmp_path) as (addresses, pages):
        jobs = [scrape(name, found[name], address) for name, address in addresses.items()]
        with prometheus(tmp_path, jobs) as url:
            async with httpx.AsyncClient(timeout=60, trust_env=False) as http:

                async def ask(path: str, **query: str) -> Any:
                    try:
                        answer = (await http.get(f"{url}/{path}", params=query)).json()
                    except (httpx.TransportError, ValueError):
                        return None
                    assert answer["status"] == "success", answer
                    return answer["data"]

                async def firing() -> dict[str, list[dict[str, str]]]:
                    fired: dict[str, list[dict[str, str]]] = {}
                    for alert in (await ask("alerts") or {"alerts": []})["alerts"]:
                        fired.setdefault(alert["labels"]["alertname"], []).append(alert["labels"])
                    return fired

                said: list[Any] = []

                async def all_read() -> bool:
                    said[:] = (await ask("targets") or {"activeTargets": []})["activeTargets"]
                    return [target["health"] for target in said] == ["up"] * len(jobs)

                def trouble() -> object:
                    return [(target["scrapeUrl"], target["lastError"]) for target in said]

                await until(all_read, "all pages to be read", 60, trouble)
                await check_queries(ask)

                async def evaluated() -> bool:
                    rules = [rule for group in (await ask("rules"))["groups"] for rule in group["rules"]]
                    return bool(rules) and all(rule["health"] == "ok" for rule in rules)

                async def told() -> bool:
                    return "TreelinePoolNotReady" in await firing()

                await until(evaluated, "every alert to be evaluated", 60)
                await until(told, "the pool that crashes to be told of", 60)
                alerts = await firing()
                ours = [(labels["namespace"], labels["name"]) for labels in alerts["TreelinePoolNotReady"]]
                assert ours == [("team", "crashes")]
                assert "TreelineOperatorGone" not in alerts
                assert "TreelineTargetDown" not in alerts
                await pages.close()

                async def gone() -> bool:
                    return {"TreelineOperatorGone", "TreelineTargetDown"} <= (await firing()).keys()

                await until(gone, "the operator to be missed", 60)
                (down,) = (await firing())["TreelineTargetDown"]
                assert (down["treeline_component"], down["pod"]) == ("operator", "operator-0")
