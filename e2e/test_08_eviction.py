"""Runtimes, Envoys and the picker are evicted, one after another; then a whole node is cordoned and drained."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from e2e.kit.system import Installed, pool
from e2e.kit.traffic import traffic

COMPONENTS = ("runtime", "edge", "epp")


@pytest.fixture(scope="module")
def treeline(of_this_file: Installed) -> Installed:
    return of_this_file


def try_to_evict(treeline: Installed, pod: dict[str, Any]) -> bool:
    """Ask for an eviction. Return whether the disruption budget allows it."""
    name, namespace = pod["metadata"]["name"], treeline.namespace
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": namespace}}
    path = f"/api/v1/namespaces/{namespace}/pods/{name}/eviction"
    said = treeline.kube.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(body), check=False)
    return "Success" in said


def uids(treeline: Installed, component: str) -> set[str]:
    return {pod["metadata"]["uid"] for pod in treeline.pods(component)}


def test_evicted_pods_drop_nothing(treeline: Installed, kept: Path) -> None:
    treeline.apply(pool("tiny", gateway={"standalone": {"replicas": 2}}))
    treeline.await_ready("tiny")
    with traffic(treeline.url(), kept=kept) as driver:
        for component in COMPONENTS:
            pods = treeline.ready_pods(component)
            treeline.until(lambda pod=pods[0]: try_to_evict(treeline, pod), f"the {component} to be evicted")
            gone = pods[0]["metadata"]["uid"]
            treeline.until(lambda c=component, uid=gone: uid not in uids(treeline, c), f"the {component} to be gone")
            treeline.until(
                lambda c=component, all_=pods: len(treeline.ready_pods(c)) == len(all_),
                "another in its place",
            )
        driver.await_served(10)
        report = driver.stop()
    assert not report.dropped, str(report)


@contextmanager
def draining(treeline: Installed, node: str) -> Iterator[threading.Thread]:
    """Run `kubectl drain` on the node of the gateway's pods during the block; the node is uncordoned afterwards."""
    words = ("--pod-selector=treeline.dev/gateway", "--delete-emptydir-data", "--ignore-daemonsets")
    drain = threading.Thread(
        target=lambda: treeline.kube.kubectl("drain", node, *words, check=False, timeout_s=200), daemon=True
    )
    drain.start()
    try:
        yield drain
    finally:
        treeline.kube.kubectl("uncordon", node)
        drain.join(200)


def test_a_drained_node_drops_nothing(treeline: Installed, kept: Path) -> None:
    """If it is the only node, nothing can start until it is uncordoned; until then the budgets keep one pod of each
    component."""
    treeline.apply(pool("tiny", gateway={"standalone": {"replicas": 2}}))
    treeline.await_ready("tiny")
    node = treeline.ready_pods("runtime")[0]["spec"]["nodeName"]
    on_it = {
        pod["metadata"]["uid"]
        for component in COMPONENTS
        for pod in treeline.pods(component)
        if pod["spec"]["nodeName"] == node
    }
    with traffic(treeline.url(), kept=kept) as driver:
        with draining(treeline, node):
            treeline.until(
                lambda: all(uids(treeline, component) - on_it for component in COMPONENTS),
                "pods in place of evicted ones",
            )
            driver.await_served(20)
        treeline.until(
            lambda: not on_it & {uid for component in COMPONENTS for uid in uids(treeline, component)},
            "all pods of the node to be gone",
        )
        treeline.await_ready("tiny")
        driver.await_served(10)
        report = driver.stop()
    assert not report.dropped, str(report)
