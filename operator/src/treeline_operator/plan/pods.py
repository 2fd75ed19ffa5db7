"""What a runtime pod's status says: serving, on its way out, without a place, failing, or still downloading."""

from __future__ import annotations

from typing import Any, Final

from treeline_wire import labels

FAILING_REASONS: Final = frozenset(
    {
        "CrashLoopBackOff",
        "ImagePullBackOff",
        "ErrImagePull",
        "ErrImageNeverPull",
        "InvalidImageName",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
    }
)
"""Reasons for which a container waits that waiting alone does not end."""
DOWNLOAD: Final = "model"
"""Name of the init container that fetches the model."""
CONTAINER: Final = "runtime"
"""Name of the engine's container."""


def is_leaving(pod: dict[str, Any]) -> bool:
    """Whether the pod is being deleted or has ended: it counts for nothing any more."""
    ended = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
    return ended or "deletionTimestamp" in pod["metadata"]


def is_ready(pod: dict[str, Any]) -> bool:
    """Whether the pod has passed its readiness probe."""
    return _condition(pod, "Ready").get("status") == "True"


def is_draining(pod: dict[str, Any]) -> bool:
    """Whether it was taken out of the rotation: it finishes its requests and gets no more."""
    return bool((pod["metadata"].get("labels") or {}).get(labels.SERVING) == "false")


def may_have_requests(pod: dict[str, Any]) -> bool:
    """Whether requests may run in it: it is ready, or its engine has been and still runs."""
    if is_ready(pod):
        return True
    for container in pod.get("status", {}).get("containerStatuses", ()):
        if container["name"] == CONTAINER:
            return bool(container.get("started")) and "running" in container.get("state", {})
    return False


def is_unschedulable(pod: dict[str, Any]) -> bool:
    """Whether the scheduler found no node for it."""
    placed = _condition(pod, "PodScheduled")
    return placed.get("status") == "False" and placed.get("reason") == "Unschedulable"


def is_failing(pod: dict[str, Any]) -> bool:
    """Whether it will not become ready by waiting alone: a container waits for a bad reason, or has ended before."""
    if is_ready(pod):
        return False
    status = pod.get("status", {})
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        if container.get("state", {}).get("waiting", {}).get("reason") in FAILING_REASONS:
            return True
        if container.get("restartCount", 0) > 0 and not container.get("ready"):
            return True
    return False


def has_model(pod: dict[str, Any]) -> bool:
    """Whether the pod's download has ended well."""
    for container in pod.get("status", {}).get("initContainerStatuses", ()):
        if container["name"] == DOWNLOAD:
            return bool(container.get("state", {}).get("terminated", {}).get("exitCode") == 0)
    return False


def _condition(pod: dict[str, Any], kind: str) -> dict[str, Any]:
    for condition in pod.get("status", {}).get("conditions", ()):
        if condition["type"] == kind:
            return dict(condition)
    return {}
