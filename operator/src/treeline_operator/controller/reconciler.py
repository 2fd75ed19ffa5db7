"""Reconciles one key: observe, plan, execute, report. Level-triggered, so it may run at any time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final, Literal

from treeline_kube.client import Client
from treeline_kube.errors import Conflict, Forbidden, Invalid, KubeError, LostLease, NotFound
from treeline_wire import labels
from treeline_wire.models import Names

from treeline_operator.actions import Plan
from treeline_operator.api.conditions import ConditionType, Reason
from treeline_operator.api.model import InferenceModel
from treeline_operator.api.parts import API_VERSION
from treeline_operator.api.pool import InferencePool, PoolStatus
from treeline_operator.controller.adapters import heard
from treeline_operator.controller.downloads import Downloads
from treeline_operator.controller.execute import Done, Executor
from treeline_operator.controller.gateways import AWAITED_S, SETTLED_S, Gateways
from treeline_operator.controller.metrics import Metrics
from treeline_operator.controller.observe import Observer
from treeline_operator.controller.picker_probe import PickerProbe
from treeline_operator.controller.queue import Outcome
from treeline_operator.controller.recorder import Recorder
from treeline_operator.controller.store import MODEL, POOL
from treeline_operator.controller.warnings import Warnings, is_stuck
from treeline_operator.plan.adapters import AdapterPlan, plan_adapters
from treeline_operator.plan.facts import condition_of, is_draining
from treeline_operator.plan.gateway import plan_gateway
from treeline_operator.plan.gateway import shared as shared_by
from treeline_operator.plan.model_names import lost_names, names_of
from treeline_operator.plan.pool import plan_pool
from treeline_operator.plan.shared_gateway import SharedGateway
from treeline_operator.status.causes import Cause
from treeline_operator.status.conditions import few, same_status
from treeline_operator.status.events import Alarms, transitions
from treeline_operator.status.gateway_status import UNHEARD_S
from treeline_operator.status.models import model_statuses
from treeline_operator.status.pool import not_understood, parent_gateways, pool_status, refusal, seen
from treeline_operator.world import Key, Observed, PoolWorld, Ref

log = logging.getLogger(__name__)

_REFUSED_AGAIN_S: Final = 30.0
_WHOLE: Final = (ConditionType.READY, ConditionType.WORKLOADS_READY)


@dataclass(slots=True)
class Reconciler:
    """One `reconcile` for all kinds of keys. What a gateway's plan was refused is reported by its pools."""

    observer: Observer
    executor: Executor
    statuses: Client
    recorder: Recorder
    metrics: Metrics
    probe: PickerProbe
    downloads: Downloads
    warnings: Warnings
    clock: Callable[[], datetime]
    wake: Callable[[Iterable[Key]], None]
    _refused: dict[Key, Cause] = field(default_factory=dict)
    _lost: dict[str, dict[str, tuple[str, ...]]] = field(default_factory=dict)
    """Namespace → pool → names that the pool does not get, for its status."""
    _common: dict[Key, object] = field(default_factory=dict)
    """The decisions of each gateway's last plan for its pools: when they change, the pools are reconciled again."""
    _gateways: Gateways = field(init=False)
    _alarms: Alarms = field(default_factory=Alarms)
    _turns: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self._gateways = Gateways(self.statuses)

    async def reconcile(self, key: Key) -> Outcome:
        """The queue's function. LostLease is the only expected exception."""
        try:
            match key.kind:
                case "pool":
                    return await self._pool(key)
                case "gateway":
                    return await self._gateway(key)
                case "models":
                    return await self._models(key)
        except LostLease:
            raise
        except (Conflict, NotFound) as exc:
            log.info("not as observed: %s", exc, extra=_about(key))
            return Outcome("conflict", retry=True)
        except KubeError as exc:
            log.warning("%s", exc, extra=_about(key))
            return Outcome("unavailable", retry=True)

    # ---- pools ------------------------------------------------------------------------------------------------

    async def _pool(self, key: Key) -> Outcome:
        pool = self.observer.pool(key.namespace, key.name)
        if pool is None:
            self.probe.forget(key.namespace, key.name)
            self._refused.pop(key, None)
            self._alarms.forget(Ref(API_VERSION, POOL, key.namespace, key.name))
            self.downloads.see(key, ())
            self.warnings.see(key, None)
            return Outcome("gone")
        if isinstance(pool, Cause):
            self.warnings.see(key, None)
            return await self._not_understood(key, pool)
        if not pool.status and not pool.deleting and await self._greet(pool):
            return Outcome("new", after_s=0.0)
        await self._turn()
        world = self.observer.pool_world(pool, self.clock())
        self.downloads.see(key, world.pods)
        world = replace(world, commits=self.downloads.commits(key))
        plan = self._planned(key, lambda: plan_pool(world))
        done = await self._execute(key, plan, pool) if plan else Done()
        gateway = key._replace(kind="gateway", name=pool.spec.gateway.name)
        await self._turn()
        after = self.observer.pool_world(pool, self.clock())
        refused = self._refused.get(key) or self._refused.get(gateway)
        status, again_s = await self._status(key, after, refused)
        due_s = await self._report(pool.ref, pool.metadata.uid, dict(pool.status), dict(status))
        self.probe.wait(pool.namespace, pool.spec.gateway.name, pool.name, _waits(status, after) and not pool.deleting)
        return _outcome(plan, done, _sooner(again_s, due_s))

    async def _turn(self) -> None:
        """Wait for one's own turn of the event loop: with one plan or status in each, pages, watches and answers are
        served between any two of them."""
        async with self._turns:
            await asyncio.sleep(0)

    async def _greet(self, pool: InferencePool) -> bool:
        """Write a first status for a new pool, since its reconciliation may take a while."""
        status = seen(self.clock())
        await self._report(pool.ref, pool.metadata.uid, {}, dict(status))
        known = self.observer.pool(pool.namespace, pool.name)
        return isinstance(known, InferencePool) and bool(known.status)

    def _planned(self, key: Key, plan: Callable[[], Plan]) -> Plan | None:
        """The plan. A defect in making it is reported in the status, not in the log alone, and tried again later."""
        try:
            return plan()
        except Exception as exc:
            log.exception("planning failed", extra=_about(key))
            what = f"{type(exc).__name__} in the plan of {key.kind} {key.name}"
            text = f"a bug in the operator, please report it: {what}"
            self._refused[key] = Cause(Reason.RECONCILE_FAILED, text)
            return None

    async def _status(self, key: Key, world: PoolWorld, refused: Cause | None) -> tuple[PoolStatus, float | None]:
        """The status, and when to look again if no watch will report the next change."""
        world, again_s = await self._with_gateways(world)
        world = replace(world, events=self.warnings.about(world))
        status = pool_status(world, self.downloads.progress(key), refused)
        if world.picker is None and _holds(status, ConditionType.ENDPOINT_PICKER_READY):
            again_s = _sooner(again_s, UNHEARD_S)
        waits = not (all(_holds(status, kind) for kind in _WHOLE) or world.pool.deleting) and is_stuck(world)
        self.warnings.see(key, world if waits else None)
        return status, again_s

    async def _with_gateways(self, world: PoolWorld) -> tuple[PoolWorld, float | None]:
        """The world with its Gateways, and when to read them again."""
        refs = () if world.pool.deleting else parent_gateways(world)
        if not refs:
            return world, None
        reported = condition_of({"status": world.pool.status}, ConditionType.GATEWAY_READY)
        awaited = reported.get("status") != "True"
        parents = await self._gateways.read(refs, awaited=awaited)
        return replace(world, parents=parents), AWAITED_S if awaited else SETTLED_S

    async def _not_understood(self, key: Key, problem: Cause) -> Outcome:
        observed = self.observer.store.get(Ref(API_VERSION, POOL, key.namespace, key.name))
        if observed is None:
            return Outcome("gone")
        await self._report_problem(observed, problem, ConditionType.READY)
        return Outcome("invalid")

    # ---- gateways ---------------------------------------------------------------------------------------------

    async def _gateway(self, key: Key) -> Outcome:
        self.probe.look(key.namespace, key.name)
        before = self._refused.get(key)
        await self._turn()
        world = self.observer.gateway_world(key.namespace, key.name, self.clock())
        plan = self._planned(key, lambda: plan_gateway(world))
        shared = shared_by(world)
        done = await self._execute(key, plan, shared.owner if shared else None) if plan else Done()
        known, common = self._common.pop(key, None), _common(shared)
        if common is not None:
            self._common[key] = common
        if self._refused.get(key) != before or known != common:
            self.wake(Key("pool", pool.namespace, pool.name) for pool in world.pools)
        return _outcome(plan, done) if world.pools or world.children else Outcome("gone")

    # ---- models -----------------------------------------------------------------------------------------------

    async def _models(self, key: Key) -> Outcome:
        await self._turn()
        models = self.observer.models(key.namespace)
        by_name = {model.name: model for model in models}
        due_s: float | None = None
        self._alarms.retain(MODEL, key.namespace, by_name)
        pools = self.observer.pools(key.namespace)
        names = names_of(models, pools)
        adapters = await self._adapters(key, models, pools, names)
        lost = {pool.name: lost_names(pool, names) for pool in pools}
        before = self._lost.get(key.namespace, {})
        self._lost[key.namespace] = lost
        self.wake(Key("pool", key.namespace, pool) for pool in lost if lost[pool] != before.get(pool, ()))
        statuses = model_statuses(models, pools, self.clock(), adapters.states)
        for name, reported in statuses.items():
            model = by_name[name]
            again_s = await self._report(model.ref, model.metadata.uid, dict(model.status), dict(reported))
            due_s = _sooner(due_s, again_s)
        for observed, problem in self.observer.unreadable_models(key.namespace):
            await self._report_problem(observed, problem, ConditionType.ACCEPTED)
        return Outcome(after_s=_sooner(due_s, adapters.again_s))

    async def _adapters(
        self, key: Key, models: tuple[InferenceModel, ...], pools: tuple[InferencePool, ...], names: Names
    ) -> AdapterPlan:
        """Ask the pods of a namespace for their adapters, and tell them which they are to have."""
        pods = {pool.name: self.observer.adapter_pods(key.namespace, pool.name) for pool in pools}
        said = await heard(self.statuses, pods)
        unreadable = (one.object.get("spec") or {} for one, _ in self.observer.unreadable_models(key.namespace))
        unread = {str(spec.get("modelName")) for spec in unreadable}
        accepted = [model for model in models if not model.deleting and names.verdicts[model.name].accepted]
        plan = plan_adapters(accepted, pools, said, self.clock(), unread=unread)
        for pod, text in plan.writes:
            change = {"metadata": {"uid": pod.uid, "annotations": {labels.ADAPTERS: text}}}
            try:
                self.observer.store.put(await self.statuses.patch_merge(pod.ref, change))
                log.info("pod %s is to have the adapters %s", pod.ref.name, text, extra=_about(key))
            except (Conflict, NotFound, Forbidden, Invalid) as exc:  # the other pods get theirs
                log.info("pod %s: %s", pod.ref.name, exc, extra=_about(key))
        return plan

    # ---- what all do ------------------------------------------------------------------------------------------

    async def _execute(self, key: Key, plan: Plan, subject: InferencePool | None) -> Done:
        for note in plan.notes:
            log.debug("%s", note, extra=_about(key))
        done = await self.executor.execute(plan)
        if done.refused:
            ref, exc = done.refused[0]
            self._refused[key] = refusal(exc.code, ref.kind, str(exc))
        elif not done.stale:
            self._refused.pop(key, None)
        for reason, what in done.written.items():
            log.info("%s %s", reason, ", ".join(what), extra=_about(key))
            bad = reason.info.good is False
            self._event(subject, "Warning" if bad else "Normal", reason, f"{reason} {', '.join(what)}")
        for ref, paths in done.drifted:
            self.metrics.drifted(ref.kind)
            text = f"{ref.kind} {ref.name} was changed by hand and is reverted: {few(paths)}"
            log.info("%s", text, extra=_about(key))
            self._event(subject, "Normal", Reason.DRIFT_CORRECTED, text)
        return done

    def _event(
        self, subject: InferencePool | None, type_: Literal["Normal", "Warning"], reason: Reason, text: str
    ) -> None:
        if subject is not None:
            self.recorder.emit(subject.ref, subject.metadata.uid, type_, reason, text)

    async def _report_problem(self, observed: Observed, problem: Cause, kind: ConditionType) -> None:
        """Report an object whose spec does not fit our types, or its preset."""
        obj = observed.object
        status = not_understood(obj, problem, self.clock(), kind)
        await self._report(observed.ref, observed.uid, obj.get("status") or {}, status)

    async def _report(self, ref: Ref, uid: str, before: dict[str, Any], status: dict[str, Any]) -> float | None:
        """Write a status if it changed, and Events for new or lasting problems. Returns the seconds until the next
        Event may be due."""
        self.metrics.conditions(ref, status.get("conditions", ()))
        due = self._alarms.due(ref, before, status, self.clock())
        for note in due.notes:
            self.recorder.emit(ref, uid, note.type, note.reason, note.message)
        if same_status(before, status):
            return due.again_s
        meta = {"name": ref.name, "namespace": ref.namespace, "uid": uid}
        obj = {"apiVersion": ref.api_version, "kind": ref.kind, "metadata": meta, "status": status}
        try:
            answer = await self.statuses.apply_status(obj)
        except (Conflict, NotFound):
            return due.again_s  # it was just deleted, or another object has its name; the watch will report it
        # Of a status, plans depend on this advice alone.
        advice = [one.get("prefill", {}).get("advisedReplicas") for one in (before, status)]
        self.observer.store.put(answer, notify=advice[0] != advice[1])
        for note in transitions(before, status):
            self.recorder.emit(ref, uid, note.type, note.reason, note.message)
        return due.again_s


def _outcome(plan: Plan | None, done: Done, again_s: float | None = None) -> Outcome:
    if plan is None:
        return Outcome("bug", retry=True)
    if done.stale:
        return Outcome("conflict", retry=True)
    if done.refused:
        return Outcome("refused", retry=True, after_s=_REFUSED_AGAIN_S)
    return Outcome("changed" if plan.actions else "ok", after_s=_sooner(plan.recheck_s, again_s))


def _sooner(one_s: float | None, other_s: float | None) -> float | None:
    """The earlier of two delays, where there are any."""
    return min((delay for delay in (one_s, other_s) if delay is not None), default=None)


def _common(shared: SharedGateway | None) -> object:
    """Return the shared inputs of all statuses of a gateway's pools, besides each spec and the gateway's objects."""
    if shared is None:
        return None
    owner, spec = shared.owner, shared.owner.spec
    settings = spec.gateway, spec.endpoint_picker, spec.tracing
    return owner.metadata.uid, owner.deleting, settings, shared.salts, shared.protections


def _waits(status: PoolStatus, world: PoolWorld) -> bool:
    """Whether a pool waits for the picker: it is not healthy yet, or pods come and go."""
    if not _holds(status, ConditionType.READY) or _holds(status, ConditionType.PROGRESSING):
        return True
    return any(is_draining(pod.object) for pod in world.pods)


def _holds(status: PoolStatus, kind: ConditionType) -> bool:
    return condition_of({"status": status}, kind).get("status") == "True"


def _about(key: Key) -> dict[str, object]:
    return {"fields": key._asdict()}
