"""The status of an InferencePool, the whole of it: conditions, and the figures that people and autoscalers read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, Final

from treeline_wire import labels

from treeline_operator import names
from treeline_operator.api.conditions import ConditionType, Reason, Status
from treeline_operator.api.pool import DownloadStatus, EndpointStatus, PoolStatus
from treeline_operator.plan import pods as reading
from treeline_operator.plan import revision as revisions
from treeline_operator.plan import runtime
from treeline_operator.plan.drain import Terms, deadline, requests
from treeline_operator.plan.keys import has_keys
from treeline_operator.plan.security import exceptions
from treeline_operator.plan.sharing import Shared, share
from treeline_operator.status import front
from treeline_operator.status.causes import Cause, Json, Progress, dig, percent
from treeline_operator.status.conditions import Finding, build, timestamp
from treeline_operator.world import PoolWorld

MAX_ENDPOINTS: Final = 50

_ABOUT_THE_MODEL: Final = frozenset(
    (
        Reason.WEIGHTS_DOWNLOADING,
        Reason.WEIGHTS_MISSING,
        Reason.DOWNLOAD_FAILED,
        Reason.MODEL_TOO_LARGE,
        Reason.MODEL_LOADING,
    )
)


def pool_status(
    world: PoolWorld, progress: Progress | None = None, refused: Cause | None = None
) -> PoolStatus:
    """The status that a pool should have. The one that it has is looked at for transition times only.

    ``progress`` are the downloads under way, by pod. ``refused`` is what the API server said to our last writes for the
    pool, see ``refusal``.
    """
    seen = _Seen(world, progress or {}, refused)
    pool, generation = world.pool, world.pool.metadata.generation
    found = _findings(seen)
    status = PoolStatus(
        observedGeneration=generation,
        conditions=build(found, generation, pool.status.get("conditions", ()), world.now),
        replicas=len(seen.active),
        readyReplicas=sum(reading.is_ready(pod) for pod in seen.active),
        selector=selector(pool.name),
        modelName=pool.spec.model.served_name,
        revision=seen.target.name,
        templateVersion=seen.target.template_version,
        endpoints=_endpoints(seen),
        gateway={
            "name": seen.shared.name,
            "epp": names.epp(seen.shared.name),
            "owner": seen.shared.owner.name,
        },
    )
    if url := front.url(world, seen.shared):
        status["url"] = url
    if (download := _download(seen)) is not None:
        status["download"] = download
    return status


def not_understood(obj: Json, problem: str, now: datetime, kind: ConditionType) -> dict[str, Any]:
    """The status of an object whose spec does not fit our types: what was known stays, but for the conditions.

    ``kind`` is the condition that says whether all is well.
    """
    before = obj.get("status") or {}
    generation = obj["metadata"].get("generation", 0)
    finding = Finding(kind, "False", Reason.SPEC_NOT_UNDERSTOOD, problem)
    conditions = build([finding], generation, before.get("conditions", ()), now)
    return {**before, "observedGeneration": generation, "conditions": conditions}


def refusal(code: int, kind: str, message: str) -> Cause:
    """What it means that the API server refused to let us write an object of ``kind``."""
    text = " ".join(message.split())
    if code == 403 and "quota" in text:
        return Cause(Reason.QUOTA_EXCEEDED, text)
    if code in (400, 403, 422) and kind == "Deployment" and ("denied" in text or "violates" in text):
        return Cause(Reason.POD_REJECTED, text)
    if code in (400, 422) and kind == "Deployment":
        return Cause(Reason.TEMPLATE_INVALID, text)
    return Cause(Reason.RECONCILE_FAILED, text)


def selector(pool: str) -> str:
    """The labels of the pods that ``replicas`` counts, as the scale subresource has them: those that do not drain."""
    match = {**runtime.selector(pool), labels.SERVING: "true"}
    return ",".join(f"{key}={value}" for key, value in sorted(match.items()))


@dataclass(frozen=True)
class _Seen:
    """A world looked at once: decoded pods, sorted by what they are."""

    world: PoolWorld
    progress: Progress
    refused: Cause | None

    @cached_property
    def shared(self) -> Shared:
        pool, members = self.world.pool, self.world.gateway.pools
        there = next((member for member in members if member.name == pool.name), None)
        if there is None or (there.deleting, there.spec) != (pool.deleting, pool.spec):
            members = (*(member for member in members if member is not there), pool)
        return share(members).of(pool)

    @cached_property
    def target(self) -> revisions.Target:
        return revisions.target(self.world.pool, revisions.existing(self.world), self.world.platform)

    @cached_property
    def live(self) -> list[dict[str, Any]]:
        """All pods that are not on their way out."""
        decoded = sorted(
            (pod.object for pod in self.world.pods), key=lambda pod: str(pod["metadata"]["name"])
        )
        return [pod for pod in decoded if not reading.is_leaving(pod)]

    @cached_property
    def active(self) -> list[dict[str, Any]]:
        """Those that do not drain."""
        return [pod for pod in self.live if _label(pod, labels.SERVING) == "true"]

    @cached_property
    def current(self) -> list[dict[str, Any]]:
        """Those of the revision that is wanted."""
        return [pod for pod in self.active if _label(pod, names.REVISION) == self.target.name]

    @cached_property
    def ready(self) -> list[dict[str, Any]]:
        return [pod for pod in self.current if reading.is_ready(pod)]

    @cached_property
    def old(self) -> list[dict[str, Any]]:
        return [pod for pod in self.active if _label(pod, names.REVISION) != self.target.name]

    @cached_property
    def old_ready(self) -> int:
        return sum(reading.is_ready(pod) for pod in self.old)

    @cached_property
    def draining(self) -> list[dict[str, Any]]:
        """Pods that finish their requests: taken out of rotation, or told to end."""
        ending = [pod.object for pod in self.world.pods]
        ending = [pod for pod in ending if "deletionTimestamp" in pod["metadata"]]
        return [*ending, *(pod for pod in self.live if _label(pod, labels.SERVING) != "true")]

    @property
    def desired(self) -> int:
        return self.world.pool.spec.replicas

    @cached_property
    def observed(self) -> bool:
        """Whether the current revision's Deployment is there and its controller has read it."""
        if self.target.existing is None:
            return False
        obj = self.target.existing.object
        read: int = (obj.get("status") or {}).get("observedGeneration", 0)
        written: int = obj["metadata"].get("generation", 0)
        return read >= written

    @cached_property
    def causes(self) -> list[Cause]:
        """Why the current revision's pods are not all ready."""
        deployments = [self.target.existing.object] if self.target.existing is not None else []
        return dig(self.current, deployments, (event.object for event in self.world.events), self.progress)


def _findings(seen: _Seen) -> list[Finding]:
    world, shared = seen.world, seen.shared
    ready_names = [str(pod["metadata"]["name"]) for pod in seen.ready]
    picker = front.picker(world, ready_names)
    needed = [_workloads(seen), _model(seen), picker, front.gateway(world, shared)]
    if (route := front.route(world, shared)) is not None:
        needed.append(route)
    found = [_ready(seen, needed), _progressing(seen, picker), *needed]
    found.extend(finding for finding in (front.scaling(world), _security(seen)) if finding is not None)
    return found


def _ready(seen: _Seen, needed: list[Finding]) -> Finding:
    kind, pool = ConditionType.READY, seen.world.pool
    if pool.deleting:
        return Finding(kind, "False", Reason.DELETING, "the pool is being deleted")
    failing = [finding for finding in needed if finding.status != "True"]
    # What needs somebody comes before what passes, and both before what is not known.
    failing.sort(key=lambda finding: (finding.status == "Unknown", finding.reason.info.good is not False))
    broken = bool(failing) and failing[0].reason.info.good is False
    if seen.desired == 0 and not broken:
        text = "replicas is 0: requests for the model are answered 503"
        return Finding(kind, "False", Reason.SCALED_TO_ZERO, text)
    if failing:
        status: Status = "False" if any(finding.status == "False" for finding in failing) else "Unknown"
        return Finding(kind, status, failing[0].reason, failing[0].detail)
    url = front.url(seen.world, seen.shared)
    where = f" at {url}" if url else ""
    notes = [finding.detail for finding in needed if not finding.reason.info.good]
    text = "; ".join([f"{pool.spec.model.served_name} is served by {_pods(len(seen.ready))}{where}", *notes])
    return Finding(kind, "True", Reason.SERVING, text)


def _workloads(seen: _Seen) -> Finding:
    kind, desired, ready = ConditionType.WORKLOADS_READY, seen.desired, len(seen.ready)
    if seen.target.existing is None and seen.refused is not None:
        return Finding(kind, "False", seen.refused.reason, seen.refused.detail)
    if seen.target.existing is None and (problem := runtime.template_problem(seen.world.pool)):
        return Finding(kind, "False", Reason.TEMPLATE_INVALID, problem + _meanwhile(seen))
    if seen.target.existing is None:
        name = names.deployment(seen.world.pool.name, seen.target.name)
        if runtime.needs_keys(seen.world.pool) and not has_keys(seen.world.gateway):
            text = f"Deployment {name} is made as soon as gateway {seen.shared.name} has its keys"
            return Finding(kind, "False", Reason.KEYS_PENDING, text + _meanwhile(seen))
        return Finding(kind, "False", Reason.PENDING, f"Deployment {name} is not there yet{_meanwhile(seen)}")
    if desired == 0:
        return Finding(kind, "True", Reason.SCALED_TO_ZERO, "no pods are asked for")
    if ready >= desired and seen.observed:
        return Finding(kind, "True", Reason.PODS_READY, f"{ready} of {desired} pods are ready")
    head = f"{ready} of {desired} pods are ready"
    if seen.causes:
        first, *others = seen.causes
        also = "".join(f"; also {one.reason} ({_pods(len(one.pods))})" for one in others if one.pods)
        return Finding(kind, "False", first.reason, f"{head}; {first.detail}{also}{_meanwhile(seen)}")
    if seen.world.pool.spec.rollout.paused and seen.old:
        return Finding(kind, "False", Reason.PAUSED, head + _meanwhile(seen))
    return Finding(
        kind, "False", Reason.ROLLING_OUT if seen.old else Reason.PODS_STARTING, head + _meanwhile(seen)
    )


def _meanwhile(seen: _Seen) -> str:
    return f"; meanwhile served by {_pods(seen.old_ready)} of older revisions" if seen.old_ready else ""


def _model(seen: _Seen) -> Finding:
    kind, model = ConditionType.MODEL_READY, seen.world.pool.spec.model
    name = model.served_name
    if seen.ready:
        served = (
            seen.world.picker.models.get(seen.world.pool.name, ()) if seen.world.picker is not None else ()
        )
        if served and name not in served:
            text = f"the pods serve {front.few(served)}, not {name}"
            return Finding(kind, "False", Reason.MODEL_NOT_SERVED, text)
        have = "has" if len(seen.ready) == 1 else "have"
        return Finding(
            kind, "True", Reason.MODEL_LOADED, f"{_pods(len(seen.ready))} {have} loaded the model {name}"
        )
    if seen.desired == 0:
        return Finding(kind, "Unknown", Reason.SCALED_TO_ZERO, "no pod loads the model")
    cause = next((cause for cause in seen.causes if cause.reason in _ABOUT_THE_MODEL), None)
    if cause is None:
        return Finding(kind, "Unknown", Reason.PODS_STARTING, f"no pod has begun to load {model.uri}")
    detail = cause.detail
    if cause.reason is Reason.WEIGHTS_DOWNLOADING and (download := _download(seen)) is not None:
        detail = f"{download['percent']} % of {model.uri} are there, downloaded by {_pods(len(cause.pods))}"
    return Finding(
        kind, "False", cause.reason, f"{model.uri}: {detail}" if model.uri not in detail else detail
    )


def _progressing(seen: _Seen, picker: Finding) -> Finding:
    kind, desired, ready, revision = (
        ConditionType.PROGRESSING,
        seen.desired,
        len(seen.ready),
        seen.target.name,
    )
    state = f"revision {revision}: {ready} of {desired} pods are ready"
    if seen.world.pool.deleting:
        return Finding(kind, "True", Reason.DELETING, f"left: {_pods(len(seen.world.pods))}")
    if seen.refused is not None:
        return Finding(kind, "False", seen.refused.reason, seen.refused.detail)
    if seen.old and seen.world.pool.spec.rollout.paused:
        return Finding(
            kind, "False", Reason.PAUSED, f"{state}; kept of older revisions: {_pods(len(seen.old))}"
        )
    settled = seen.observed and ready >= desired and len(seen.current) == desired
    if not settled and _overdue(seen):
        return Finding(kind, "False", Reason.ROLLOUT_STALLED, state)
    if seen.old:
        text = f"{state}; left of older revisions: {_pods(len(seen.old))}"
        drains = f"; {_draining(seen)}" if seen.draining else ""
        return Finding(kind, "True", Reason.ROLLING_OUT, text + drains)
    if not settled:
        moving = len(seen.current) != desired
        return Finding(kind, "True", Reason.SCALING if moving else Reason.PODS_STARTING, state)
    if seen.draining:
        return Finding(kind, "True", Reason.DRAINING, _draining(seen))
    if former := front.former_envoys(seen.world):
        return Finding(
            kind, "True", Reason.ROLLING_OUT, f"{state}; left of Envoys with former settings: {_pods(former)}"
        )
    if desired == 0:
        return Finding(kind, "False", Reason.SCALED_TO_ZERO, "no pods are asked for")
    if picker.reason is Reason.ENDPOINTS_MISSING:
        return Finding(kind, "True", picker.reason, f"{state}; {picker.detail}")
    return Finding(kind, "False", Reason.ROLLOUT_COMPLETE, state)


def _draining(seen: _Seen) -> str:
    """Who finishes how many requests until when."""
    timeout = timedelta(seconds=seen.world.pool.spec.drain.timeout_seconds)
    terms = Terms.of(seen.world)
    ends = []
    for pod in seen.draining:
        told = pod["metadata"].get("deletionTimestamp")
        ends.append(datetime.fromisoformat(told) if told else deadline(pod, timeout, seen.world.now))
    known = [count for pod in seen.draining if (count := terms.in_flight(pod)) is not None]
    left = f", {requests(sum(known))}" if known else ""
    latest = max((end for end in ends if end is not None), default=None)
    until = f", until {timestamp(latest)} at the latest" if latest is not None else ""
    return f"finishing their requests: {_pods(len(seen.draining))}{left}{until}"


def _security(seen: _Seen) -> Finding | None:
    """Where the pods go beyond what the operator would make by itself; None where they do not."""
    if seen.target.existing is None:
        return None
    found = exceptions(seen.target.existing.object["spec"]["template"]["spec"])
    if not found:
        return None
    text = f"spec.template makes pods less confined: {front.few(found)}"
    return Finding(ConditionType.SECURITY_EXCEPTIONS, "True", Reason.POD_SECURITY_EXCEPTION, text)


def _overdue(seen: _Seen) -> bool:
    """Whether the Deployment's controller has given up waiting for the current revision."""
    status = (seen.target.existing.object.get("status") or {}) if seen.target.existing is not None else {}
    return any(
        condition["type"] == "Progressing" and condition.get("reason") == "ProgressDeadlineExceeded"
        for condition in status.get("conditions") or ()
    )


def _endpoints(seen: _Seen) -> list[EndpointStatus]:
    """The pods that have an address. Without a picker's word, a ready pod that does not drain is held to serve."""
    listed = revisions.routable(seen.world.picker, seen.world.pool.name)
    port, found = seen.world.pool.spec.engine.port, []
    for pod in seen.live:
        host = (pod.get("status") or {}).get("podIP")
        if not host:
            continue
        name, ready = str(pod["metadata"]["name"]), reading.is_ready(pod)
        serving = ready and _label(pod, labels.SERVING) == "true" and (listed is None or name in listed)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        found.append(EndpointStatus(name=name, address=address, ready=ready, serving=serving))
    return found[:MAX_ENDPOINTS]


def _download(seen: _Seen) -> DownloadStatus | None:
    """The downloads of the current revision's pods together; None if none is under way."""
    busy = {pod for cause in seen.causes if cause.reason is Reason.WEIGHTS_DOWNLOADING for pod in cause.pods}
    told = [seen.progress[pod] for pod in sorted(busy) if pod in seen.progress]
    done, total = sum(one for one, _ in told), sum(whole for _, whole in told)
    if not total or not all(whole for _, whole in told):
        return None
    return DownloadStatus(percent=percent(done, total), bytesDone=done, bytesTotal=total)


def _pods(count: int) -> str:
    return f"{count} pod{'' if count == 1 else 's'}"


def _label(obj: Mapping[str, Any], name: str) -> str:
    return str((obj["metadata"].get("labels") or {}).get(name, ""))
