"""Pods too large for every node, or with devices that no node has, in the scheduler's own words."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.control_plane import ControlPlane, programs_or_skip
from support.operator_trouble import unscheduled
from treeline_bench.processes import before_exec
from treeline_operator.api.conditions import Reason
from treeline_operator.plan.facts import condition_of
from treeline_operator.status.causes import Cause, diagnose

GPU = "nvidia.com/gpu"
SMALL = (
    "0/5 nodes are available: 2 Insufficient nvidia.com/gpu, 3 node(s) didn't match Pod's node affinity/selector. "
    "preemption: 0/5 nodes are available: 5 Preemption is not helpful for scheduling."
)


def wanting(devices: int = 0, cpu: str = "1", **spec: Any) -> dict[str, Any]:
    asked = {"cpu": cpu} | ({GPU: str(devices)} if devices else {})
    container = {"name": "runtime", "image": "i", "resources": {"requests": asked, "limits": asked}}
    return {"containers": [container], **spec}


def cause(spec: dict[str, Any], message: str) -> Cause:
    (found,) = diagnose([{"metadata": {"name": "p"}, "spec": spec, "status": unscheduled(message)}])
    return found


@pytest.mark.parametrize(
    ("spec", "message", "reason"),
    [
        (wanting(8), SMALL, Reason.NODES_TOO_SMALL),
        (wanting(1), SMALL, Reason.DEVICES_MISSING),
        (wanting(0, "64"), SMALL.replace(GPU, "cpu"), Reason.NODES_TOO_SMALL),
        (wanting(8), SMALL.replace("5 Preemption", "4 Preemption"), Reason.INSUFFICIENT_CAPACITY),
        (wanting(8), SMALL.replace("2 Insufficient", "2 node(s) were unschedulable, 2 Insufficient"), None),
        (wanting(8), SMALL.replace("didn't", "had untolerated taint {node.kubernetes.io/not-ready: }, didn't"), None),
        (wanting(8), SMALL.partition(" preemption")[0], None),
        (wanting(8), "", None),
    ],
)
def test_a_lack_is_reported_only_if_the_scheduler_says_so_of_every_node(
    spec: dict[str, Any], message: str, reason: Reason | None
) -> None:
    assert cause(spec, message).reason is (reason or Reason.INSUFFICIENT_CAPACITY)


def test_the_message_has_the_request_and_quotes_the_scheduler() -> None:
    told = cause(wanting(8), SMALL).detail
    assert "the pod needs 8 of nvidia.com/gpu, and no eligible node has as much: 0/5 nodes are" in told
    assert "no eligible node offers nvidia.com/gpu: 0/5 nodes are" in cause(wanting(1), SMALL).detail


# ---- a real scheduler -----------------------------------------------------------------------------------------------


@pytest.fixture
def scheduler(control_plane: ControlPlane) -> Iterator[ControlPlane]:
    """Run a scheduler with a node of four devices, and one without."""
    folder = programs_or_skip("kubernetes")["kubernetes"]
    for name, devices in (("four", 4), ("none", 0)):
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {"size": name}}}
        control_plane.request("POST", "/api/v1/nodes", node)
        capacity = {"cpu": "16", "memory": "64Gi", "pods": "20"} | ({GPU: str(devices)} if devices else {})
        conditions = [{"type": "Ready", "status": "True"}]
        status = {"capacity": capacity, "allocatable": capacity, "conditions": conditions}
        merge = "application/merge-patch+json"
        control_plane.request("PATCH", f"/api/v1/nodes/{name}/status", {"status": status}, content_type=merge)
        ready = {"spec": {"taints": None}}
        control_plane.request("PATCH", f"/api/v1/nodes/{name}", ready, content_type=merge)
    config = control_plane.kubeconfig("system:kube-scheduler", ("system:masters",))
    command = [str(folder / "kube-scheduler"), f"--kubeconfig={config}", "--leader-elect=false", "--secure-port=0"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, preexec_fn=before_exec())
    yield control_plane
    process.kill()
    process.wait(30)
    for name in ("four", "none"):
        control_plane.request("DELETE", f"/api/v1/nodes/{name}")


@pytest.mark.integration
@pytest.mark.deep
def test_a_real_scheduler_uses_these_words(scheduler: ControlPlane, namespace: str) -> None:
    def tried(name: str, spec: dict[str, Any]) -> tuple[dict[str, Any], str]:
        path = f"/api/v1/namespaces/{namespace}/pods"
        scheduler.request("POST", path, {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec})
        deadline = time.monotonic() + 60
        while True:
            pod: dict[str, Any] = scheduler.request("GET", f"{path}/{name}")
            placed = condition_of(pod, "PodScheduled")
            if placed.get("status") == "True" or "preemption" in placed.get("message", ""):
                return pod, str(placed.get("message", ""))
            assert time.monotonic() < deadline, placed
            time.sleep(0.05)

    pod, said = tried("eight", wanting(8))
    assert diagnose([pod])[0].reason is Reason.NODES_TOO_SMALL, said
    pod, said = tried("many-cpus", wanting(0, "64"))
    assert diagnose([pod])[0].reason is Reason.NODES_TOO_SMALL, said
    pod, said = tried("elsewhere", wanting(1, nodeSelector={"size": "none"}))
    assert diagnose([pod])[0].reason is Reason.DEVICES_MISSING, said
    pod, said = tried("fits", wanting(4))
    assert said == ""
    pod, said = tried("full", wanting(2))
    assert diagnose([pod])[0].reason is Reason.INSUFFICIENT_CAPACITY, said
    pod, said = tried("nowhere", wanting(1, nodeSelector={"size": "huge"}))
    assert diagnose([pod])[0].reason is Reason.INSUFFICIENT_CAPACITY, said
