"""What a runtime pod's status says: serving, on its way out, without a place, failing, or still downloading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from treeline_wire import labels

from treeline_operator.plan.facts import condition_of, label

IMAGE_REASONS: Final = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "ImageInspectError",
        "RegistryUnavailable",
        "SignatureValidationFailed",
    }
)
CONFIG_REASONS: Final = frozenset(
    {
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
        "StartError",
        "PreCreateHookError",
    }
)
FAILING_REASONS: Final = IMAGE_REASONS | CONFIG_REASONS | {"CrashLoopBackOff"}
"""Reasons for which a container waits that waiting alone does not end."""
DOWNLOAD: Final = "model"
"""Name of the init container that fetches the model."""
CONTAINER: Final = "runtime"
"""Name of the engine's container."""


def is_leaving(pod: dict[str, Any]) -> bool:
    """Whether the pod is being deleted or has ended: it counts for nothing any more."""
    ended = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
    return ended or "deletionTimestamp" in pod["metadata"]


def is_ready(pod: Mapping[str, Any]) -> bool:
    """Whether the pod has passed its readiness probe."""
    return condition_of(pod, "Ready").get("status") == "True"


def is_available(pod: Mapping[str, Any]) -> bool:
    """Whether it is ready and nobody has ended it."""
    return is_ready(pod) and not pod["metadata"].get("deletionTimestamp")


def is_draining(pod: dict[str, Any]) -> bool:
    """Whether it was taken out of the rotation: it finishes its requests and gets no more."""
    return label(pod, labels.SERVING) == "false"


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
    placed = condition_of(pod, "PodScheduled")
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
