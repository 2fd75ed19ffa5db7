"""The status of an InferencePool, the whole of it: conditions, and the figures that people and autoscalers read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from treeline_wire import labels

from treeline_operator import names
from treeline_operator.api.conditions import ConditionType, Reason, Status
from treeline_operator.api.pool import (
    AutoscalingStatus,
    DownloadStatus,
    PoolStatus,
    PrefillStatus,
    PresetStatus,
    RoutingStatus,
)
from treeline_operator.plan import download, facts, provision, runtime
from treeline_operator.plan.drain import DrainPolicy, deadline, requests
from treeline_operator.plan.engines import engine_of, overridden, unseen_args
from treeline_operator.plan.facts import find
from treeline_operator.plan.gateway import template_problem
from treeline_operator.plan.gateway_common import has_keys
from treeline_operator.plan.pool import lacking_groups
from treeline_operator.plan.replicas import Target
from treeline_operator.plan.tokenizers import by_history, not_held
from treeline_operator.status import gateway_status
from treeline_operator.status.causes import Cause, Json, Progress, percent
from treeline_operator.status.conditions import Judgement, build, few, timestamp
from treeline_operator.status.view import PoolView
from treeline_operator.world import PoolWorld, Ref

_MESSAGE: Final = 512
_WORKLOADS: Final = ("Deployment", "LeaderWorkerSet")

_ABOUT_THE_MODEL: Final = frozenset(
    (
        Reason.WEIGHTS_DOWNLOADING,
        Reason.WEIGHTS_MISSING,
        Reason.DOWNLOAD_FAILED,
        Reason.MODEL_TOO_LARGE,
        Reason.MODEL_LOADING,
    )
)


def pool_status(world: PoolWorld, progress: Progress | None = None, refused: Cause | None = None) -> PoolStatus:
    """The new status of a pool. The present one is used for transition times only.

    `progress` are the running downloads, by pod. `refused` is the API server's refusal of our last writes for the pool,
    see `refusal`.
    """
    if refused is None and (problem := template_problem(world.gateway)):
        refused = Cause(Reason.TEMPLATE_INVALID, problem)
    view = PoolView(world, progress or {}, refused)
    pool, generation = world.pool, world.pool.metadata.generation
    status = PoolStatus(
        observedGeneration=generation,
        conditions=build(_judged(view), generation, pool.status.get("conditions", ()), world.now),
        replicas=len(view.active),
        readyReplicas=(ready := sum(facts.is_ready(pod) for pod in view.active)),
        replicaSummary=f"{ready}/{view.desired}",
        selector=selector(pool.name),
        modelName=pool.spec.model.served_name,
        revision=view.target.name,
        gateway={
            "name": view.shared.name,
            "epp": names.epp(view.shared.name),
            "owner": view.shared.owner.name,
        },
    )
    if (prompts := view.prompts) is not None:
        ready = sum(facts.is_ready(pod) for pod in prompts.active)
        status["prefill"] = PrefillStatus(replicas=len(prompts.active), ready=ready)
        if advised := (world.scaling and world.scaling.prompts) or pool.advised_prefill:
            status["prefill"].update(PrefillStatus(advisedReplicas=advised))
    if url := gateway_status.url(world, view.shared):
        status["url"] = url
    if name := pool.spec.preset:
        status["preset"] = PresetStatus(
            name=name,
            engine=pool.spec.engine.type,
            port=pool.spec.engine.port,
            adapters=[adapter.name for adapter in pool.spec.engine.adapters],
            policy=pool.spec.endpoint_picker.chosen,
        )
    if commit := download.recorded(world).get(pool.spec.model.uri):
        status["modelCommit"] = commit
    if (fetched := _download(view)) is not None:
        status["download"] = fetched
    if scaled := _last_scaled(world):
        status["autoscaling"] = scaled
    if (told := view.routing) is not None:
        status["routing"] = RoutingStatus(way=told.way, reason=told.reason) if told.reason else {"way": told.way}
    return status


def parent_gateways(world: PoolWorld) -> tuple[Ref, ...]:
    """The Gateways of a pool whose own status says whether they are ready; none without Gateway API."""
    return gateway_status.gateway_refs(world, PoolView(world, {}, None).shared)


def cautions(world: PoolWorld) -> list[tuple[Reason, str]]:
    """Warnings about a pool that do not depend on its pods."""
    view = PoolView(world, {}, None)
    judged = _warnings(view)
    found = [judged[1:] if judged is not None else None, gateway_status.caution(view.shared)]
    return [one for one in found if one is not None]


def seen(now: datetime) -> PoolStatus:
    """The first status of a pool, before anything is planned for it: it judges no generation of the spec yet."""
    text = "the operator has seen the pool and will plan it soon"
    judged: Judgement = "Unknown", Reason.PENDING, text
    return PoolStatus(conditions=build({ConditionType.READY: judged}, 0, (), now))


def not_understood(obj: Json, problem: Cause, now: datetime, kind: ConditionType) -> dict[str, Any]:
    """The status of an object whose spec does not fit our types or its preset: the previous one with new conditions.

    `kind` is the main condition.
    """
    before = obj.get("status") or {}
    generation = obj["metadata"].get("generation", 0)
    judged: Judgement = "False", problem.reason, problem.detail
    conditions = build({kind: judged}, generation, before.get("conditions", ()), now)
    return {**before, "observedGeneration": generation, "conditions": conditions}


def refusal(code: int, kind: str, message: str) -> Cause:
    """The meaning of a refusal to write an object of `kind`."""
    text = " ".join(message.split())
    if code == 403 and "quota" in text:
        return Cause(Reason.QUOTA_EXCEEDED, text)
    if code in (400, 403, 422) and kind in _WORKLOADS and ("denied" in text or "violates" in text):
        return Cause(Reason.POD_REJECTED, text)
    if code in (400, 422) and kind in _WORKLOADS:
        return Cause(Reason.TEMPLATE_INVALID, text)
    return Cause(Reason.RECONCILE_FAILED, text)


def selector(pool: str) -> str:
    """The labels of the pods that `replicas` counts, in the form of the scale subresource: they answer, and do not
    drain."""
    match = {**runtime.selector(pool), labels.SERVING: "true"}
    return ",".join([*(f"{key}={value}" for key, value in sorted(match.items())), f"{labels.ROLE}!=prefill"])


def _judged(view: PoolView) -> dict[ConditionType, Judgement]:
    world, shared = view.world, view.shared
    prompts = view.prompts
    ready = [str(pod["metadata"]["name"]) for pod in (*view.ready, *(prompts.ready if prompts is not None else ()))]
    picker = gateway_status.picker(world, ready)
    needed = _told(
        {
            ConditionType.WORKLOADS_READY: _both(view, _workloads),
            ConditionType.MODEL_READY: _model(view),
            ConditionType.ENDPOINT_PICKER_READY: _or_refused(view, picker),
            ConditionType.GATEWAY_READY: _or_refused(view, gateway_status.gateway(world, shared)),
            ConditionType.ROUTE_ACCEPTED: gateway_status.route(world, shared),
        }
    )
    others = {
        ConditionType.READY: _ready(view, needed),
        ConditionType.PROGRESSING: _both(view, lambda side: _progressing(side, picker)),
        ConditionType.SCALING_ACTIVE: _scaling(world),
        ConditionType.CACHES_TRUSTED: _caches(world),
        ConditionType.WARNINGS: _warnings(view),
    }
    return needed | _told(others)


def _both(view: PoolView, judge: Callable[[PoolView], Judgement]) -> Judgement:
    """The judgement of a pool's pods; of the worse side where some only compute prompts, with what both sides say."""
    if view.prompts is None:
        return judge(view)
    told = judge(view), judge(view.prompts)
    if told[0] == told[1]:
        return told[0]
    # Problems that need action come first, then what passes.
    worst = min(told, key=lambda judged: {False: 0, None: 1, True: 2}[judged[1].info.good])
    return *worst[:2], f"decode: {told[0][2]}; prefill: {told[1][2]}"


def _or_refused(view: PoolView, judged: Judgement) -> Judgement:
    """A missing object may never appear."""
    refused = view.refused
    return judged if refused is None or judged[1] is not Reason.PENDING else ("False", refused.reason, refused.detail)


def _told(judged: Mapping[ConditionType, Judgement | None]) -> dict[ConditionType, Judgement]:
    return {kind: found for kind, found in judged.items() if found is not None}


def _ready(view: PoolView, needed: Mapping[ConditionType, Judgement]) -> Judgement:
    pool = view.world.pool
    if pool.deleting:
        return "False", Reason.DELETING, "the pool is being deleted"
    lacking = {kind: judged for kind, judged in needed.items() if judged[0] != "True"}
    # Problems that need action come first, then transient ones, then unknown states.
    failing = sorted(lacking.values(), key=lambda judged: (judged[0] == "Unknown", judged[1].info.good is not False))
    broken = bool(failing) and failing[0][1].info.good is False
    if view.desired == 0 and not broken:
        text = "replicas is 0: requests for the model get 503"
        text += ", and wake it" * (pool.spec.autoscaling.type == "Picker")
        return "False", Reason.SCALED_TO_ZERO, text
    # Requests still succeed through the serving pods, while others are missing or not listed yet.
    lets_serve = all(
        kind is ConditionType.WORKLOADS_READY or judged[1] is Reason.ENDPOINTS_MISSING
        for kind, judged in lacking.items()
    )
    if failing and not (view.serving and lets_serve):
        status: Status = "False" if any(judged[0] == "False" for judged in failing) else "Unknown"
        return status, *failing[0][1:]
    url = gateway_status.url(view.world, view.shared)
    where = f" at {url}" if url else ""
    notes = [detail for _, reason, detail in needed.values() if not reason.info.good]
    text = "; ".join([f"{pool.spec.model.served_name} is served by {_pods(len(view.serving))}{where}", *notes])
    # A pool that serves with other settings than its spec's also shows why in the column REASON.
    told = [*failing[:broken], *(judged for judged in needed.values() if judged[1].info.good is False)]
    return "True", told[0][1] if told else Reason.SERVING, text


def _workloads(view: PoolView) -> Judgement:
    desired, ready = view.desired, len(view.ready)
    if view.target.existing is None and view.refused is not None:
        return "False", view.refused.reason, view.refused.detail
    if view.target.existing is None and (problem := runtime.template_problem(view.world.pool)):
        return "False", Reason.TEMPLATE_INVALID, problem + _meanwhile(view)
    if view.target.existing is None and (lacking := lacking_groups(view.world)):
        return "False", Reason.LEADER_WORKER_SET_MISSING, lacking + _meanwhile(view)
    if view.target.existing is None:
        kind = _WORKLOADS[view.world.pool.spec.accelerator.nodes > 1]
        name = f"{kind} {names.deployment(view.world.pool.name, view.target.name)}"
        if runtime.needs_keys(view.world.pool) and not has_keys(view.world.gateway):
            text = f"{name} is created once gateway {view.shared.name} has its keys"
            return "False", Reason.KEYS_PENDING, text + _meanwhile(view)
        return "False", Reason.PENDING, f"{name} is not there yet{_meanwhile(view)}"
    if view.target.existing.is_unseen(view.world.now):
        name = view.target.existing.observed.ref.name
        text = f"no controller has seen LeaderWorkerSet {name}: is LeaderWorkerSet's controller running?"
        return "False", Reason.LEADER_WORKER_SET_MISSING, text + _meanwhile(view)
    if desired == 0:
        return "True", Reason.SCALED_TO_ZERO, "no pods are wanted"
    if ready >= desired and view.observed:
        return "True", Reason.PODS_READY, f"{ready} of {desired} pods are ready"
    head = f"{ready} of {desired} pods are ready"
    if view.causes:
        first, *others = view.causes
        also = "".join(f"; also {one.reason} ({_pods(len(one.pods))})" for one in others if one.pods)
        return "False", first.reason, f"{head}; {first.detail}{also}{_meanwhile(view)}"
    if view.world.pool.spec.rollout.paused and view.old:
        return "False", Reason.PAUSED, head + _meanwhile(view)
    return "False", Reason.ROLLING_OUT if view.old else Reason.PODS_STARTING, head + _meanwhile(view)


def _meanwhile(view: PoolView) -> str:
    return f"; meanwhile served by {_pods(view.old_ready)} of older revisions" if view.old_ready else ""


def _model(view: PoolView) -> Judgement:
    pool, picker = view.world.pool, view.world.picker
    model, name = pool.spec.model, pool.spec.model.served_name
    served = picker.models.get(pool.name, ()) if picker is not None else ()
    if view.ready and served and name not in served:
        return "False", Reason.MODEL_NOT_SERVED, f"the pods serve {few(served)}, not {name}"
    if loaded := view.ready or view.serving:
        older = "" if view.ready else " of older revisions"
        have = "has" if len(loaded) == 1 else "have"
        return "True", Reason.MODEL_LOADED, f"{_pods(len(loaded))}{older} {have} loaded the model {name}"
    if view.desired == 0:
        return "Unknown", Reason.SCALED_TO_ZERO, "no pod loads the model"
    cause = next((cause for cause in view.causes if cause.reason in _ABOUT_THE_MODEL), None)
    if cause is None:
        return "Unknown", Reason.PODS_STARTING, f"no pod loads {model.uri}"
    detail = cause.detail
    if cause.reason is Reason.WEIGHTS_DOWNLOADING and (done := _download(view)) is not None:
        detail = f"{done['percent']} % of {model.uri} are there, downloaded by {_pods(len(cause.pods))}"
    return "False", cause.reason, f"{model.uri}: {detail}" if model.uri not in detail else detail


def _progressing(view: PoolView, picker: Judgement) -> Judgement:
    desired, ready = view.desired, len(view.ready)
    state = f"revision {view.target.name}: {ready} of {desired} pods are ready"
    if view.world.pool.deleting:
        return "True", Reason.DELETING, f"left: {_pods(len(view.world.pods))}"
    if view.refused is not None:
        return "False", view.refused.reason, view.refused.detail
    if view.old and view.world.pool.spec.rollout.paused:
        return "False", Reason.PAUSED, f"{state}; kept of older revisions: {_pods(len(view.old))}"
    settled = view.observed and ready >= desired and len(view.current) == desired
    there = view.target.existing
    if not settled and there is not None and runtime.is_late(view.world.pool, there.object, view.world.now):
        return "False", Reason.ROLLOUT_STALLED, state
    if view.old:
        text = f"{state}; left of older revisions: {_pods(len(view.old))}"
        drains = f"; {_draining(view)}" if view.draining else ""
        return "True", Reason.ROLLING_OUT, text + drains
    if not settled:
        moving = len(view.current) != desired
        return "True", Reason.SCALING if moving else Reason.PODS_STARTING, state
    if view.draining:
        return "True", Reason.DRAINING, _draining(view)
    if former := gateway_status.former_envoys(view.world):
        return "True", Reason.ROLLING_OUT, f"{state}; left of Envoys with former settings: {_pods(former)}"
    if desired == 0:
        return "False", Reason.SCALED_TO_ZERO, "no pods are wanted"
    _, reason, missing = picker
    if reason is Reason.ENDPOINTS_MISSING:
        return "True", reason, f"{state}; {missing}"
    return "False", Reason.ROLLOUT_COMPLETE, state


def _scaling(world: PoolWorld) -> Judgement | None:
    """Whether the operator sets the replicas; None if it is not asked to."""
    if world.pool.spec.autoscaling.type == "None":
        return None
    state, target = world.scaling, Target.of(world.pool.spec.autoscaling)
    if state is None:
        return "Unknown", Reason.PENDING, "no picker was asked yet"
    if state.owner:
        return "False", Reason.SCALED_BY_ANOTHER, f"{state.owner} scales the pool"
    if not state.heard:
        return "False", Reason.SIGNALS_MISSING, f"no picker of gateway {world.gateway.name} reports the demand"
    text = f"the demand sets replicas between {target.least} and {target.most}"
    return "True", Reason.AUTOSCALER_ACTIVE, text


def _caches(world: PoolWorld) -> Judgement | None:
    """Whether pods have switched caches off; as before while the picker has not asked the pods, or one of the named."""
    if world.pool.spec.engine.type != "treeline":
        return None
    picker = world.picker
    listed = picker.pools.get(world.pool.name, ()) if picker is not None else ()
    off = [f"pod {one.name} ({', '.join(one.cache_sources_off)})" for one in listed if one.cache_sources_off]
    if off:
        return "False", Reason.CACHE_WRONG, f"caches are not used any more, an audit found wrong pages: {few(off)}"
    told = facts.condition_of({"status": world.pool.status}, ConditionType.CACHES_TRUSTED)
    unasked = any(f"pod {one.name} (" in told.get("message", "") for one in listed if not one.ready)
    if (ready := sum(one.ready for one in listed)) and not unasked:
        return "True", Reason.CACHES_IN_USE, f"used by {_pods(ready)}"
    reason = next((one for one in (Reason.CACHE_WRONG, Reason.CACHES_IN_USE) if one == told.get("reason")), None)
    if reason is None or (picker is not None and picker.synced and not listed):
        return None
    return told["status"], reason, told["message"].removesuffix(f" {reason.fix}")


def _last_scaled(world: PoolWorld) -> AutoscalingStatus:
    """The last time that the replicas were set by it; what an earlier operator wrote of that stays."""
    if world.pool.spec.autoscaling.type != "Picker":
        return {}
    if world.scaling is None or (last := world.scaling.last) is None:
        return world.pool.status.get("autoscaling", {})
    return {"lastScaleTime": timestamp(last.at), "replicas": last.replicas, "message": last.why[:_MESSAGE]}


def _draining(view: PoolView) -> str:
    """Draining pods, their requests and deadline."""
    timeout = timedelta(seconds=view.world.pool.spec.drain.timeout_seconds)
    policy = DrainPolicy.of(view.world)
    ends = []
    for pod in view.draining:
        reported = pod["metadata"].get("deletionTimestamp")
        ends.append(datetime.fromisoformat(reported) if reported else deadline(pod, timeout, view.world.now))
    known = [count for pod in view.draining if (count := policy.in_flight(pod)) is not None]
    left = f", {requests(sum(known))}" if known else ""
    latest = max((end for end in ends if end is not None), default=None)
    until = f", until {timestamp(latest)} at the latest" if latest is not None else ""
    return f"finishing their requests: {_pods(len(view.draining))}{left}{until}"


def _warnings(view: PoolView) -> Judgement | None:
    """Parts of the spec without effect, the first with its reason; None if there are none."""
    pool = view.world.pool
    found: list[tuple[Reason, str]] = []
    for asked in provision.wanted(pool):
        there = find(view.world.children, "PersistentVolumeClaim", asked.name)
        if trouble := provision.unshareable(pool, asked, there):
            found.append((Reason.CLAIM_NOT_SHAREABLE, trouble))
    if other := download.differing(view.world):
        found.append((Reason.VERSIONS_DIFFER, other))
    if (unused := pool.spec.unused_devices) > 0:
        text = f"accelerator.count is {pool.spec.accelerator.count}, and {unused} of them are unused"
        found.append((Reason.DEVICES_UNUSED, text))
    if why := _history(view):
        found.append((Reason.ROUTED_BY_HISTORY, f"{why}: requests are routed by history"))
    if what := unseen_args(engine_of(pool).unseen, pool.spec.engine.args):
        found.append((Reason.ARGS_UNTOLD, what))
    if what := overridden(pool):
        found.append((Reason.ARGS_OVERRIDE, what))
    if paths := runtime.template_overruled(pool):
        found.append(
            (Reason.TEMPLATE_OVERRULED, f"the operator's own values of {few(paths)} replace those of spec.template")
        )
    if other := not_held(pool, view.shared):
        found.append((Reason.GATEWAY_CONFLICT, other))
    if not found:
        return None
    return "True", found[0][0], "; ".join(text for _, text in found)


def _history(view: PoolView) -> str:
    """Why the picker does not route by the pods' events; empty if it does, or if they should publish none."""
    pool, told = view.world.pool, view.routing
    if why := by_history(pool):
        return why
    heeded = pool.spec.endpoint_picker.heeds_caches and engine_of(pool).publishes
    if not heeded or told is None or told.way != "history":
        return ""
    return " ".join(f"the picker reports {told.reason or told.way}: {told.message}".split())


def _download(view: PoolView) -> DownloadStatus | None:
    """The downloads of the current revision's pods together; None if none is under way."""
    busy = {pod for cause in view.causes if cause.reason is Reason.WEIGHTS_DOWNLOADING for pod in cause.pods}
    reported = [view.progress[pod] for pod in sorted(busy) if pod in view.progress]
    done, total = sum(one for one, _ in reported), sum(whole for _, whole in reported)
    if not total or not all(whole for _, whole in reported):
        return None
    return DownloadStatus(percent=percent(done, total), bytesDone=done, bytesTotal=total)


def _pods(count: int) -> str:
    return f"{count} pod{'' if count == 1 else 's'}"
