"""Finds why pods are not ready, from pods, their containers' states, Events, and what makes the pods. The best cause
comes first."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from treeline_operator.api.conditions import Reason
from treeline_operator.plan import facts
from treeline_operator.plan.facts import (
    CONFIG_REASONS,
    DOWNLOAD,
    IMAGE_REASONS,
    condition_of,
    container_statuses,
    is_ready,
)
from treeline_operator.status.conditions import few, with_fix
from treeline_operator.world import Event

Json = Mapping[str, Any]
Progress = Mapping[str, tuple[int, int]]
"""Pod name → bytes of weights that are there, and bytes in all (0: unknown)."""

_RANK: Final = (
    Reason.KEY_SECRET_MISSING,
    Reason.CONFIG_ERROR,
    Reason.WEIGHTS_MISSING,
    Reason.MODEL_TOO_LARGE,
    Reason.DOWNLOAD_FAILED,
    Reason.IMAGE_PULL_FAILING,
    Reason.OUT_OF_MEMORY,
    Reason.CRASH_LOOPING,
    Reason.TEMPLATE_INVALID,
    Reason.POD_REJECTED,
    Reason.QUOTA_EXCEEDED,
    Reason.VOLUME_NOT_READY,
    Reason.DEVICES_MISSING,
    Reason.NODES_TOO_SMALL,
    Reason.INSUFFICIENT_CAPACITY,
    Reason.PROBE_FAILING,
    Reason.WEIGHTS_DOWNLOADING,
    Reason.MODEL_LOADING,
    Reason.PODS_STARTING,
)
"""Order of causes: what a correction fixes, then what more room fixes, then what passes by itself."""

_MODEL_REASONS: Final = {
    str(reason): reason for reason in (Reason.DOWNLOAD_FAILED, Reason.MODEL_TOO_LARGE, Reason.WEIGHTS_MISSING)
}
_MOUNT_EVENTS: Final = ("FailedMount", "FailedAttachVolume", "FailedMapVolume")
_BACK_OFF: Final = re.compile(r'^Back-off pulling image "[^"]*"(: )?')
_PULL_PREFIX: Final = re.compile(r"^(ErrImagePull|ImagePullBackOff): ")
_PREEMPTION: Final = re.compile(r"\s*preemption: .*$", re.DOTALL)
_NODES: Final = re.compile(r"^0/(\d+) nodes are available")
_HOPELESS: Final = re.compile(r"preemption: .*\b(\d+) Preemption is not helpful")
_REFUSED_POD: Final = re.compile(r'^(error creating: )?pods? "[^"]*" is (forbidden: )?', re.IGNORECASE)
"""Names of pods that cannot be made differ at every try."""
_ABSENT: Final = re.compile(r'(secret|configmap) "([^"]+)" not found')
_ESCAPES: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x1f\x7f]")
_DEVICE_MEMORY: Final = re.compile(r"CUDA out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED")
_NO_WEIGHTS: Final = re.compile(
    r"there is no folder|is a file; give the folder|has no (config|tokenizer)\.json|has no \*\.safetensors"
    r"|Repo id must be in the form|Invalid repository ID or local directory"  # vLLM and SGLang, for an absent folder
    r"|Can't load the configuration of|does not appear to have a file named|Cannot find any model weights"
)
"""The text that engines print if there is no model at their path."""
_ERROR: Final = re.compile(
    r"\berror:|\bValue error, |\b(ERROR|FATAL|CRITICAL)\b"
    rf"|^([\w.]*\.)?\w*(Error|Exception)(:|$)|^({'|'.join(_MODEL_REASONS)}): "
)
"""A line that names an error."""
_HINT: Final = re.compile(r"--help\b|root cause above|^\s*usage:", re.IGNORECASE)
"""A line that points to further reading, although it may look like an error."""
_MAX_LINE: Final = 300
_ASKED_TO_END: Final = (0, 137, 143)
"""Exit codes of containers that the kubelet stopped: by themselves, killed, or by the signal."""


class Cause(NamedTuple):
    """Why something is not ready. `pods` are those concerned; none where there is no pod to speak of."""

    reason: Reason
    detail: str
    pods: tuple[str, ...] = ()

    @property
    def message(self) -> str:
        return with_fix(self.reason, self.detail)


def diagnose(
    pods: Iterable[Json],
    workloads: Iterable[Json] = (),
    events: Iterable[Event] = (),
    progress: Progress | None = None,
) -> list[Cause]:
    """Find why these pods are not ready: each reason once, the most useful first. `workloads` (Deployments,
    LeaderWorkerSets) make the pods, `events` are the namespace's Warning events; both may contain others.
    """
    there = sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))
    reported = _Events(events)
    found = [cause for pod in there if (cause := of_pod(pod, reported, progress or {})) is not None]
    grouped: dict[Reason, list[Cause]] = {}
    for cause in found:
        grouped.setdefault(cause.reason, []).append(cause)
    causes = [_together(causes, len(there)) for causes in grouped.values()]
    seen = set(grouped)
    for cause in creation_failures(workloads, reported, len(there)):
        if cause.reason not in seen:
            seen.add(cause.reason)
            causes.append(cause)
    return sorted(causes, key=lambda cause: _RANK.index(cause.reason))


def of_pod(pod: Json, events: _Events, progress: Progress) -> Cause | None:
    """Why one pod is not ready; None for one that is, or that ends, unless its end is its group's."""
    meta, status = pod["metadata"], pod.get("status") or {}
    own = events.about(meta)
    troubles = list(_of_group(pod, own))
    if not troubles and (meta.get("deletionTimestamp") or is_ready(pod) or status.get("phase") == "Succeeded"):
        return None
    troubles = troubles or list(_of_scheduling(pod))
    if not troubles:
        for init in (True, False):
            for container in container_statuses(pod, init=init):
                troubles.extend(_of_container(container, init, own, progress.get(meta["name"])))
        if not _has_begun(pod):
            troubles.extend(_of_volumes(own))
    best = min(troubles, key=lambda trouble: _RANK.index(trouble[0]), default=(Reason.PODS_STARTING, "starts"))
    return Cause(best[0], best[1], (meta["name"],))


def creation_failures(workloads: Iterable[Json], events: _Events, pods: int) -> Iterator[Cause]:
    """Why Deployments and LeaderWorkerSets cannot make pods: quotas, policies, what the API server finds invalid.
    `pods` is the number of those that are there."""
    for workload in workloads:
        kind, name = workload["kind"], workload["metadata"]["name"]
        refusal = condition_of(workload, "ReplicaFailure")
        said = [refusal.get("message", "")] if refusal.get("status") == "True" else []
        spec = workload.get("spec") or {}
        wanted, there = spec.get("replicas") or 0, (workload.get("status") or {}).get("replicas", 0)
        if kind == "LeaderWorkerSet":  # it counts a group before its workers exist
            wanted, there = wanted * spec["leaderWorkerTemplate"]["size"], pods
        if not said and there < wanted:
            # The Deployment's controller repeats the ReplicaSet's problem a moment later; LeaderWorkerSet's never.
            said = events.of_makers(name)
        for message in said[:1]:
            text = _REFUSED_POD.sub("", _line(message))
            yield Cause(_creation_reason(text), f"{kind} {name} cannot make pods: {text}")


class _Events:
    """Warning events by the object that they are about, the latest first."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._all = sorted(events, key=lambda event: event.at, reverse=True)

    def about(self, meta: Json) -> list[Event]:
        """The Events about an object."""
        uid = meta.get("uid")
        return [event for event in self._all if event.name == meta["name"] and (event.uid or uid) == uid]

    def of_makers(self, name: str) -> list[str]:
        """Why the ReplicaSets of a Deployment, or the StatefulSets of a LeaderWorkerSet, could not make pods."""
        failed = (event for event in self._all if event.reason == "FailedCreate")
        return [event.message for event in failed if name in (event.name, event.name.rpartition("-")[0])]


def _of_scheduling(pod: Json) -> Iterator[tuple[Reason, str]]:
    status = pod.get("status") or {}
    if status.get("phase") == "Failed":
        why, text = status.get("reason", "Failed"), _line(status.get("message", ""))
        lacking = why == "Evicted" or why.startswith("OutOf") or why in ("NodeAffinity", "UnexpectedAdmissionError")
        yield (Reason.INSUFFICIENT_CAPACITY if lacking else Reason.PODS_STARTING), f"{why}: {text}"
    placed = condition_of(pod, "PodScheduled")
    if placed.get("status", "True") == "True":
        return
    text = _line(_PREEMPTION.sub("", placed.get("message") or "no node found"))
    if placed.get("reason") == "SchedulingGated":
        yield Reason.PODS_STARTING, f"held back by a scheduling gate: {text}"
    elif "persistentvolumeclaim" in text.lower() or "volume node affinity" in text:
        yield Reason.VOLUME_NOT_READY, text
    else:
        yield _lack(pod, placed.get("message") or "", text)


def _lack(pod: Json, said: str, text: str) -> tuple[Reason, str]:
    """Find what an unscheduled pod lacks: room on full nodes, larger nodes, or devices.

    The scheduler reports that preemption does not help for nodes that would be too small even if empty, and also for
    nodes that are away: if the message shows those, sizes are unknown.
    """
    lacking = facts.lacking_of(said)
    passing = "node.kubernetes.io/" in said or "were unschedulable" in said
    nodes, hopeless = _NODES.search(said), _HOPELESS.search(said)
    if not lacking or passing or not nodes or not hopeless or nodes[1] != hopeless[1]:
        return Reason.INSUFFICIENT_CAPACITY, text
    asked = facts.requests(pod.get("spec") or {})
    for name in sorted(lacking):
        if "/" in name and asked.get(name) == 1:
            return Reason.DEVICES_MISSING, f"no eligible node offers {name}: {text}"
    wants = " and ".join(f"{asked.get(name, 'more')} of {name}" for name in sorted(lacking))
    return Reason.NODES_TOO_SMALL, f"the pod needs {wants}, and no eligible node has as much: {text}"


def _of_group(pod: Json, events: Sequence[Event]) -> Iterator[tuple[Reason, str]]:
    """The ends of containers in a pod of a group. The first one ends the group, so the pod is being deleted already, or
    it looks ready, as it has no probe."""
    if facts.group_index(pod) is None:
        return
    for container in container_statuses(pod):
        for state in (container.get("state"), container.get("lastState")):
            ended = (state or {}).get("terminated") or {}
            if ended.get("exitCode", 0) not in _ASKED_TO_END or ended.get("reason") == "OOMKilled":
                yield _after(container, ended, events)


def _has_begun(pod: Json) -> bool:
    """Whether a container has ever run: then the volumes are mounted, and earlier Events are outdated."""
    return any(
        container.get("lastState") or (container.get("state") or {}).keys() & {"running", "terminated"}
        for container in container_statuses(pod)
    )


def _of_container(
    container: Json, init: bool, events: Sequence[Event], progress: tuple[int, int] | None
) -> Iterator[tuple[Reason, str]]:
    name, state = container["name"], container.get("state") or {}
    waiting, running = state.get("waiting") or {}, state.get("running")
    why = waiting.get("reason", "")
    if why in IMAGE_REASONS:
        yield Reason.IMAGE_PULL_FAILING, _pull_failure(container, waiting, events)
    elif why in CONFIG_REASONS:
        message = waiting.get("message", why)
        yield _absent(message) or Reason.CONFIG_ERROR, f"container {name}: {_line(message)}"
    ended = _ending(container, init)
    if ended is not None:
        yield _after(container, ended, events)
    elif running is not None and init:
        yield _downloading(name, progress)
    elif running is not None and not container.get("ready"):
        yield _not_ready(name, container, events)


def _ending(container: Json, init: bool) -> Json | None:
    """The container's last end, if that is why it does not run well. Only init containers may end well."""
    state = container.get("state") or {}
    last: Json | None = (container.get("lastState") or {}).get("terminated")
    now: Json | None = state.get("terminated")
    if now is not None:
        return now if now.get("exitCode") != 0 else None
    if (state.get("waiting") or {}).get("reason") == "CrashLoopBackOff":
        return last or {}
    # Between two ends it runs for a while; one restart may be bad luck.
    again = container.get("restartCount", 0) >= 2 and not container.get("ready")
    return last if last is not None and again and not (init and last.get("exitCode") == 0) else None


def _after(container: Json, ended: Json, events: Sequence[Event]) -> tuple[Reason, str]:
    name, code, restarts = container["name"], ended.get("exitCode", "?"), container.get("restartCount", 0)
    line = _telling_line(ended.get("message", ""))
    head, _, rest = line.partition(": ")
    if head in _MODEL_REASONS:
        return _MODEL_REASONS[head], f"container {name}: {rest}"
    times = f"{restarts} restart{'' if restarts == 1 else 's'}"
    if ended.get("reason") == "OOMKilled":
        return (
            Reason.OUT_OF_MEMORY,
            f"container {name} was killed: it used more memory than its limit ({times})",
        )
    probe = _unhealthy(events, readiness=False)
    if code in _ASKED_TO_END and probe is not None:
        return Reason.PROBE_FAILING, f"container {name} was restarted ({times}): {_line(probe)}"
    words = f"; its last line: {line}" if line else "; it logged nothing"
    text = f"container {name} ended with exit code {code} ({times}){words}"
    if _NO_WEIGHTS.search(line):
        return Reason.WEIGHTS_MISSING, text
    return (Reason.MODEL_TOO_LARGE if _DEVICE_MEMORY.search(line) else Reason.CRASH_LOOPING), text


def _downloading(name: str, progress: tuple[int, int] | None) -> tuple[Reason, str]:
    if name != DOWNLOAD:
        return Reason.PODS_STARTING, f"init container {name} runs"
    if progress is None:
        return Reason.WEIGHTS_DOWNLOADING, "the weights are being downloaded"
    done, total = progress
    if not total:
        return Reason.WEIGHTS_DOWNLOADING, f"{size(done)} of the weights are there"
    return Reason.WEIGHTS_DOWNLOADING, f"{percent(done, total)} % of {size(total)} are there"


def _not_ready(name: str, container: Json, events: Sequence[Event]) -> tuple[Reason, str]:
    if not container.get("started", True):
        return Reason.MODEL_LOADING, f"container {name} runs and has not passed its start-up probe yet"
    # Failures of the startup probe are over once it has passed.
    probe = _unhealthy(events, readiness=True)
    if probe is not None:
        return Reason.PROBE_FAILING, f"container {name} runs, but: {_line(probe)}"
    return Reason.PODS_STARTING, f"container {name} runs and is not ready yet"


def _unhealthy(events: Sequence[Event], *, readiness: bool) -> str | None:
    """The last failed probe, of readiness or of startup and liveness."""
    failed = (event.message for event in events if event.reason == "Unhealthy")
    return next((text for text in failed if text.startswith("Readiness") == readiness), None)


def _pull_failure(container: Json, waiting: Json, events: Sequence[Event]) -> str:
    """The registry's message. The kubelet alternates between it and "Back-off pulling image"."""
    text = _PULL_PREFIX.sub("", _BACK_OFF.sub("", waiting.get("message", "")))
    if not text:
        failed = f'Failed to pull image "{container["image"]}": '
        text = next((one.message.removeprefix(failed) for one in events if one.message.startswith(failed)), "")
    return f"image {container['image']} of container {container['name']}: {_line(text) or 'it cannot be pulled'}"


def _of_volumes(events: Sequence[Event]) -> Iterator[tuple[Reason, str]]:
    for event in events:
        if event.reason in _MOUNT_EVENTS:
            yield _absent(event.message) or Reason.VOLUME_NOT_READY, _line(event.message)
            return
        if event.reason == "FailedCreatePodSandBox":
            yield Reason.PODS_STARTING, _line(event.message)
            return


def _absent(message: str) -> Reason | None:
    """The cause if the Secret or ConfigMap in the message does not exist."""
    found = _ABSENT.search(message)
    if found is None:
        return None
    return Reason.KEY_SECRET_MISSING if found[2].endswith("-kv-keys") else Reason.CONFIG_ERROR


def _creation_reason(text: str) -> Reason:
    if "quota" in text or "per Container is" in text or "per Pod is" in text:
        return Reason.QUOTA_EXCEEDED
    if re.search(r'serviceaccount "[^"]+" not found', text):
        return Reason.CONFIG_ERROR
    if text.startswith("invalid") or "Invalid value" in text:
        return Reason.TEMPLATE_INVALID
    return Reason.POD_REJECTED


def _together(causes: Sequence[Cause], total: int) -> Cause:
    """One cause for all pods that have it: what most of them say, and how many they are."""
    most = Counter(cause.detail for cause in causes)
    detail = min(most, key=lambda text: (-most[text], text))
    pods = tuple(pod for cause in causes for pod in cause.pods)
    return Cause(causes[0].reason, f"{len(pods)} of {total} pods ({few(pods, 3)}): {detail}", pods)


def percent(done: int, total: int) -> int:
    """The percentage done; 100 only for all."""
    return min(100, 100 * done // total) if total else 0


def size(count: int) -> str:
    """Bytes for people."""
    number = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            break
        number /= 1024
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"


def _telling_line(text: str) -> str:
    """The last line that names an error; without one, the last line with text."""
    lines = [flat for line in text.splitlines() if (flat := _line(_message(line)))]
    said = [line for line in lines if not _HINT.search(line)] or lines
    errors = [line for line in said if _ERROR.search(line)]
    return (errors or said or [""])[-1]


def _message(line: str) -> str:
    """The message in a line of our programs' logs, which is a JSON object; any other line unchanged."""
    try:
        return str(json.loads(line)["message"]) if line.startswith("{") else line
    except (ValueError, KeyError, RecursionError):
        return line


def _line(text: str) -> str:
    """One line without control characters, of bearable length."""
    flat = " ".join(_ESCAPES.sub(" ", text).split())
    return flat if len(flat) <= _MAX_LINE else flat[: _MAX_LINE - 1] + "…"
