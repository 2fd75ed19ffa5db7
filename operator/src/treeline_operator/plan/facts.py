"""What an object that is there says of itself: labels, annotations, conditions, how far its controller is; of a pod
whether it serves, is on its way out, has no place, fails, or still downloads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, Final

from treeline_wire import labels

from treeline_operator.world import Observed

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


def find(children: Iterable[Observed], kind: str, name: str, group: str | None = None) -> Observed | None:
    """A child by kind and name, and by API group where kinds of several have that name."""
    for child in children:
        ref = child.ref
        if (ref.kind, ref.name) == (kind, name) and group in (None, ref.api_version.rpartition("/")[0]):
            return child
    return None


def label(obj: Mapping[str, Any], name: str) -> str:
    """The value of a label; empty without it."""
    return str((obj["metadata"].get("labels") or {}).get(name, ""))


def annotation(obj: Mapping[str, Any], name: str) -> str:
    """The value of an annotation; empty without it."""
    return str((obj["metadata"].get("annotations") or {}).get(name, ""))


def created(obj: Mapping[str, Any]) -> datetime:
    """When an object was made; long ago where it does not say."""
    return datetime.fromisoformat(obj["metadata"].get("creationTimestamp") or "1970-01-01T00:00:00Z")


def is_observed(obj: Mapping[str, Any]) -> bool:
    """Whether its controller has read its spec as it is now."""
    read: int = (obj.get("status") or {}).get("observedGeneration", 0)
    written: int = obj["metadata"].get("generation", 0)
    return read >= written


def since(obj: Mapping[str, Any], kind: str) -> datetime | None:
    """Since when a condition is as it is, or the object where it is not reported; None where neither says."""
    told = condition_of(obj, kind).get("lastTransitionTime") or obj["metadata"].get("creationTimestamp")
    return datetime.fromisoformat(told) if told else None


def is_overdue(deployment: Mapping[str, Any]) -> bool:
    """Whether the Deployment's controller has given up waiting for its newest pods."""
    return condition_of(deployment, "Progressing").get("reason") == "ProgressDeadlineExceeded"


def condition_of(obj: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """A condition of an object's status by its type; empty where it is not reported."""
    reported: Iterable[Mapping[str, Any]] = (obj.get("status") or {}).get("conditions") or ()
    return next((one for one in reported if one["type"] == kind), {})


def is_leaving(pod: Mapping[str, Any]) -> bool:
    """Whether the pod is being deleted or has ended: it counts for nothing any more."""
    ended = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
    return ended or "deletionTimestamp" in pod["metadata"]


def is_ready(pod: Mapping[str, Any]) -> bool:
    """Whether the pod has passed its readiness probe."""
    return condition_of(pod, "Ready").get("status") == "True"


def is_available(pod: Mapping[str, Any]) -> bool:
    """Whether it is ready and not deleted."""
    return is_ready(pod) and not pod["metadata"].get("deletionTimestamp")


def is_draining(pod: Mapping[str, Any]) -> bool:
    """Whether it was taken out of the rotation: it finishes its requests and gets no more."""
    return label(pod, labels.SERVING) == "false"


def container_statuses(pod: Mapping[str, Any], *, init: bool | None = None) -> Iterator[Mapping[str, Any]]:
    """What the kubelet says of a pod's containers: of init containers, of the others, or of all in this order."""
    status = pod.get("status") or {}
    if init is not False:
        yield from status.get("initContainerStatuses") or ()
    if init is not True:
        yield from status.get("containerStatuses") or ()


def state_of(container: Mapping[str, Any], state: str) -> Mapping[str, Any]:
    """Of a container's status what it says of `waiting`, `running` or `terminated`; empty where it is not in it."""
    return (container.get("state") or {}).get(state) or {}


def may_have_requests(pod: Mapping[str, Any]) -> bool:
    """Whether requests may run in it: it is ready, or its engine has been and still runs."""
    engine = next((one for one in container_statuses(pod, init=False) if one["name"] == CONTAINER), {})
    return is_ready(pod) or (bool(engine.get("started")) and "running" in engine.get("state", {}))


def is_unschedulable(pod: Mapping[str, Any]) -> bool:
    """Whether the scheduler found no node for it."""
    placed = condition_of(pod, "PodScheduled")
    return placed.get("status") == "False" and placed.get("reason") == "Unschedulable"


def is_failing(pod: Mapping[str, Any]) -> bool:
    """Whether it will not become ready by waiting alone: a container waits for a bad reason, or has ended before."""
    return not is_ready(pod) and any(
        state_of(one, "waiting").get("reason") in FAILING_REASONS
        or (one.get("restartCount", 0) > 0 and not one.get("ready"))
        for one in container_statuses(pod)
    )


def downloaded(pod: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """How the pod's download has ended, if well."""
    ends = (state_of(one, "terminated") for one in container_statuses(pod, init=True) if one["name"] == DOWNLOAD)
    return next((end for end in ends if end.get("exitCode") == 0), None)
