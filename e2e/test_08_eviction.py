"""What a node drain does to runtimes, Envoy and the picker, one after another, by the eviction API."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from e2e.kit.system import Installed, pool
from e2e.kit.traffic import traffic


def evict(treeline: Installed, pod: dict) -> None:
    """Ask for an eviction until the disruption budget allows it."""
    name, namespace = pod["metadata"]["name"], treeline.namespace
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": namespace}}
    path = f"/api/v1/namespaces/{namespace}/pods/{name}/eviction"

    def allowed() -> bool:
        said = treeline.kube.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(body), check=False)
        return "Success" in said

    treeline.until(allowed, f"{name} to be evicted", 60.0)


@pytest.mark.parametrize("component", ["runtime", "edge", "epp"])
def test_an_evicted_pod_drops_nothing(treeline: Installed, kept: Path, component: str) -> None:
    treeline.apply(pool("tiny", gateway={"standalone": {"replicas": 2}}))
    treeline.await_ready("tiny")
    pods = treeline.ready_pods(component)
    with traffic(treeline.url(), kept=kept) as driver:
        driver.await_served(5)
        evict(treeline, pods[0])
        gone = pods[0]["metadata"]["uid"]
        treeline.until(
            lambda: gone not in {p["metadata"]["uid"] for p in treeline.pods(component)},
            "the pod to be gone",
            90.0,
        )
        treeline.until(lambda: len(treeline.ready_pods(component)) == len(pods), "another in its place")
        driver.await_served(10)
        report = driver.stop()
    assert not report.dropped, str(report)
    treeline.conclude()
