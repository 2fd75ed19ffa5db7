"""Reads facts from observed objects: labels, annotations, conditions, progress. For a pod: whether it serves, leaves,
has no node, fails or downloads; and whether a pod without a node would fit in the place of another."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any, Final

from treeline_wire import labels

from treeline_operator.quantity import quantity
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
ADAPTERS: Final = "adapters"
"""Name of the container that loads adapters into the engine beside it."""


def find(children: Iterable[Observed], kind: str, name: str, group: str | None = None) -> Observed | None:
    """A child by kind and name, and by API group if several groups have a kind of that name."""
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
    """The time of an object's creation; long ago if it has none."""
    return datetime.fromisoformat(obj["metadata"].get("creationTimestamp") or "1970-01-01T00:00:00Z")


def is_observed(obj: Mapping[str, Any]) -> bool:
    """Whether its controller has processed the present spec; of a LeaderWorkerSet, whether it has seen it at all."""
    if obj["kind"] == "LeaderWorkerSet":
        return bool(obj.get("status"))
    read: int = (obj.get("status") or {}).get("observedGeneration", 0)
    written: int = obj["metadata"].get("generation", 0)
    return read >= written


def since(obj: Mapping[str, Any], kind: str) -> datetime | None:
    """Since when a condition has its status, or the object exists if it is not reported; None if unknown."""
    told = condition_of(obj, kind).get("lastTransitionTime") or obj["metadata"].get("creationTimestamp")
    return datetime.fromisoformat(told) if told else None


def is_overdue(deployment: Mapping[str, Any]) -> bool:
    """Whether the Deployment's controller has given up waiting for its newest pods."""
    return condition_of(deployment, "Progressing").get("reason") == "ProgressDeadlineExceeded"


def condition_of(obj: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """A condition of an object's status by its type; empty where it is not reported."""
    reported: Iterable[Mapping[str, Any]] = (obj.get("status") or {}).get("conditions") or ()
    return next((one for one in reported if one["type"] == kind), {})


def pod_template(workload: Mapping[str, Any]) -> Mapping[str, Any]:
    """The template of the pods that serve, in a Deployment or a LeaderWorkerSet."""
    spec: Mapping[str, Any] = workload["spec"]
    found: Mapping[str, Any] = (
        spec["template"] if "template" in spec else spec["leaderWorkerTemplate"]["leaderTemplate"]
    )
    return found


def group_index(pod: Mapping[str, Any]) -> int | None:
    """The number of the pod's group in its LeaderWorkerSet; None for pods of a Deployment, or if the label is none."""
    index = label(pod, labels.GROUP_INDEX)
    return int(index) if index.isdecimal() else None


def is_worker(pod: Mapping[str, Any]) -> bool:
    """Whether a pod of a LeaderWorkerSet is another than its group's leader, which alone serves."""
    return label(pod, labels.WORKER_INDEX) not in ("", "0")


def is_leaving(pod: Mapping[str, Any]) -> bool:
    """Whether the pod is being deleted or has ended."""
    ended = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
    return ended or "deletionTimestamp" in pod["metadata"]


def is_ready(pod: Mapping[str, Any]) -> bool:
    """Whether the pod passes its readiness probe."""
    return condition_of(pod, "Ready").get("status") == "True"


def is_available(pod: Mapping[str, Any]) -> bool:
    """Whether it is ready and not being deleted."""
    return is_ready(pod) and not pod["metadata"].get("deletionTimestamp")


def is_draining(pod: Mapping[str, Any]) -> bool:
    """Whether it is out of rotation: it finishes its requests and gets no more."""
    return label(pod, labels.SERVING) == "false"


def container_statuses(pod: Mapping[str, Any], *, init: bool | None = None) -> Iterator[Mapping[str, Any]]:
    """Container statuses of a pod: of init containers, of the others, or of all in this order."""
    status = pod.get("status") or {}
    if init is not False:
        yield from status.get("initContainerStatuses") or ()
    if init is not True:
        yield from status.get("containerStatuses") or ()


def state_of(container: Mapping[str, Any], state: str) -> Mapping[str, Any]:
    """The details of a container's `waiting`, `running` or `terminated` state; empty in another state."""
    return (container.get("state") or {}).get(state) or {}


def may_have_requests(pod: Mapping[str, Any]) -> bool:
    """Whether requests may run in it: it is ready, or its engine was ready and still runs."""
    engine = next((one for one in container_statuses(pod, init=False) if one["name"] == CONTAINER), {})
    return is_ready(pod) or (bool(engine.get("started")) and "running" in engine.get("state", {}))


def is_unschedulable(pod: Mapping[str, Any]) -> bool:
    """Whether the scheduler found no node for it."""
    placed = condition_of(pod, "PodScheduled")
    return placed.get("status") == "False" and placed.get("reason") == "Unschedulable"


def is_failing(pod: Mapping[str, Any]) -> bool:
    """Whether waiting will not make it ready: a container waits for a bad reason, or has ended before."""
    return not is_ready(pod) and any(
        state_of(one, "waiting").get("reason") in FAILING_REASONS
        or (one.get("restartCount", 0) > 0 and not one.get("ready"))
        for one in container_statuses(pod)
    )


def downloaded(pod: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Whether the pod's download has ended well."""
    ends = (state_of(one, "terminated") for one in container_statuses(pod, init=True) if one["name"] == DOWNLOAD)
    return next((end for end in ends if end.get("exitCode") == 0), None)


Json = Mapping[str, Any]

_LACKING: Final = re.compile(r"Insufficient ([^\s,.]+(?:\.[^\s,.]+)*)")
_TOO_MANY: Final = "Too many pods"
_PLACING: Final = ("nodeSelector", "affinity", "tolerations", "runtimeClassName", "schedulerName", "nodeName")
"""Fields of a pod that decide on which nodes it may be."""


def waited_s(pods: Iterable[Json], refused_since: str | None, now: datetime) -> float:
    """The longest time for which one of these pods has had no node; `refused_since` is when pods began to be refused
    before they were made."""
    begun = [since(pod, "PodScheduled") for pod in pods]
    begun += [datetime.fromisoformat(refused_since)] if refused_since else []
    return max(((now - one).total_seconds() for one in begun if one is not None), default=0.0)


def fits_in_place(pods: Iterable[Json], new: Json, old: Json) -> bool:
    """Whether unscheduled pods of the template `new` would get a node if a pod of the template `old` left. Both are pod
    specs.

    It is certain only if the nodes are the same and the new pod needs no more of the lacking resource. Pods without a
    suitable node for another reason (a taint, a volume, a misspelt class) would find none either way, so nothing may be
    removed for them. If there are no pods, a quota refuses them.
    """
    if any(new.get(field) != old.get(field) for field in _PLACING):
        return False
    needed, freed = requests(new), requests(old)
    lacking: set[str] = set()
    for pod in pods:
        words = str(condition_of(pod, "PodScheduled").get("message", ""))
        short = lacking_of(words)
        if not short and _TOO_MANY not in words:
            return False
        lacking |= short
    wanted = lacking or needed.keys()
    return all(needed.get(name, Decimal(0)) <= freed.get(name, Decimal(0)) for name in wanted)


def lacking_of(words: str) -> set[str]:
    """The resources of which nodes have too little, in a message of the scheduler."""
    return set(_LACKING.findall(words))


def requests(pod: Json) -> dict[str, Decimal]:
    """The requests that the scheduler counts: the sum of the containers that run together, or an init container's if it
    needs more."""
    total: dict[str, Decimal] = {}
    inits = pod.get("initContainers", ())
    beside = [one for one in inits if one.get("restartPolicy") == "Always"]
    for container in (*pod.get("containers", ()), *beside):
        for name, value in _asked(container).items():
            total[name] = total.get(name, Decimal(0)) + value
    for container in inits:
        for name, value in _asked(container).items():
            total[name] = max(total.get(name, Decimal(0)), value)
    return total


def _asked(container: Json) -> dict[str, Decimal]:
    resources = container.get("resources") or {}
    found = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: quantity(value) or Decimal(0) for name, value in found.items()}
