"""A cluster in memory that executes plans until nothing is left to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from treeline_operator import names
from treeline_operator.actions import Action, Apply, CreateKeys, Delete, Mark, Plan, Scale
from treeline_operator.api.parts import API_VERSION
from treeline_operator.api.pool import InferencePool
from treeline_operator.controller.observe import Observer
from treeline_operator.controller.store import Store
from treeline_operator.plan.diff import merge_key, merge_keys, whole_spec
from treeline_operator.plan.gateway import plan_gateway
from treeline_operator.plan.pool import plan_pool
from treeline_operator.world import Key, Observed, Platform, PoolWorld, Ref

Object = dict[str, Any]

_ROUNDS: Final = 20


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One action, with the object before and after it; None where it is or becomes absent."""

    key: Key
    action: Action
    before: Object | None
    after: Object | None

    @property
    def verb(self) -> str:
        """create, change, scale or delete."""
        match self.action:
            case Delete():
                return "delete"
            case Scale():
                return "scale"
            case CreateKeys():
                return "create"
            case Mark():
                return "change"
            case Apply():
                return "create" if self.before is None else "change"


@dataclass(slots=True)
class Simulation:
    """Objects, and the steps that were taken on them. Nothing runs in it: rollouts stop where they wait for pods."""

    platform: Platform
    now: datetime
    steps: list[SimulatedStep] = field(default_factory=list)
    notes: dict[Key, tuple[str, ...]] = field(default_factory=dict)
    _store: Store = field(default_factory=Store)
    _applied: dict[Ref, Object] = field(default_factory=dict)
    """The objects that the operator applied last."""
    _version: int = 1

    def put(self, obj: Object) -> None:
        """Add an object as the cluster would store it, with a made-up uid if it has none."""
        ref = Ref.of(obj)
        known = self._store.get(ref)
        meta: Object = {**obj["metadata"], "resourceVersion": str(self._next())}
        made_up = known.uid if known is not None else f"uid-of-{ref.kind}-{ref.name}".lower()
        meta.setdefault("uid", made_up)
        if ref.api_version == API_VERSION:
            meta.setdefault("generation", 1)
        self._store.put({**obj, "metadata": meta})

    def objects(self, api_version: str, kind: str, namespace: str) -> list[Observed]:
        """All objects of a kind in a namespace."""
        return self._store.of_kind(api_version, kind, namespace)

    def get(self, ref: Ref) -> Object | None:
        """The object as it is now."""
        observed = self._store.get(ref)
        return None if observed is None else observed.object

    def recall(self) -> None:
        """Treat the objects that the operator would apply for the present pools as already applied."""
        past = Simulation(self.platform, self.now)
        for ref, _ in sorted(self._store.pools()):
            past.put(self.get(ref) or {})
        past.run()
        self._applied = past._applied

    def run(self) -> bool:
        """Plan and execute until no action is left; False if that does not end, which is a defect."""
        observer = Observer(self._store, self.platform)
        for _ in range(_ROUNDS):
            acted = False
            for key in sorted(observer.all_keys(), key=lambda key: (key.namespace, key.kind, key.name)):
                plan = self._plan(observer, key)
                if plan is None:
                    continue
                self.notes[key] = plan.notes
                for action in plan.actions:
                    self._do(key, action)
                    acted = True
            if not acted:
                return True
        return False

    def worlds(self) -> Iterator[PoolWorld]:
        """The pools, each with its present objects."""
        observer = Observer(self._store, self.platform)
        for ref, _ in sorted(self._store.pools()):
            pool = observer.pool(ref.namespace, ref.name)
            if isinstance(pool, InferencePool):
                yield observer.pool_world(pool, self.now)

    def _plan(self, observer: Observer, key: Key) -> Plan | None:
        match key.kind:
            case "gateway":
                return plan_gateway(observer.gateway_world(key.namespace, key.name, self.now))
            case "pool":
                pool = observer.pool(key.namespace, key.name)
                return plan_pool(observer.pool_world(pool, self.now)) if isinstance(pool, InferencePool) else None
        return None

    def _do(self, key: Key, action: Action) -> None:
        before = self.get(action.ref)
        after: Object | None = None
        match action:
            case Apply():
                there = before
                if before is not None and action.clears and (spec := whole_spec(action.object, before)) is not None:
                    there = {**before, "spec": spec}
                after = merged(there, self._applied.get(action.ref), action.object)
                self._applied[action.ref] = action.object
            case CreateKeys():
                after = action.object
            case Scale() if before is not None:
                after = {**before, "spec": {**before["spec"], "replicas": action.replicas}}
            case Mark() if before is not None:
                after = marked(before, action)
            case Delete() if before is not None:
                self._store.remove(action.ref, action.uid, str(self._next()))
        if after is not None and not isinstance(action, CreateKeys):
            self.put(after)
        self.steps.append(SimulatedStep(key, action, before, after))

    def _next(self) -> int:
        self._version += 1
        return self._version


def merged(there: Any, before: Any, applied: Any, keys: tuple[str, ...] = ()) -> Any:
    """The result of server-side apply: our fields as given, other owners' fields unchanged, and without fields that we
    applied `before` and leave out now. `keys` is the path of field names to this value."""
    if isinstance(applied, dict):
        have, had = (one if isinstance(one, dict) else {} for one in (there, before))
        made = {}
        for name, value in have.items():
            if name in applied:
                made[name] = merged(value, had.get(name), applied[name], (*keys, name))
            elif name not in had:
                made[name] = value
            elif isinstance(value, dict | list) and (left := merged(value, had[name], type(value)(), (*keys, name))):
                made[name] = left
        return made | {name: value for name, value in applied.items() if name not in have}
    merge_by = merge_keys(keys, applied) if isinstance(applied, list) else None
    if merge_by is None or not isinstance(there, list):
        return applied
    have, had = ({merge_key(item, merge_by): item for item in one or ()} for one in (there, before))
    ours = {merge_key(item, merge_by): item for item in applied}
    changed = [merged(have.get(key), had.get(key), item, keys) for key, item in ours.items()]
    return changed + [item for key, item in have.items() if key not in ours and key not in had]


def marked(pod: Object, mark: Mark) -> Object:
    """The result of marking a pod: our marks are replaced as a whole."""
    meta = pod["metadata"]
    ours = (names.DRAINING_SINCE, names.DELETION_COST)
    kept = {name: value for name, value in (meta.get("annotations") or {}).items() if name not in ours}
    marks = {
        "labels": {**(meta.get("labels") or {}), **mark.labels},
        "annotations": {**kept, **mark.annotations},
    }
    return {**pod, "metadata": {**meta, **marks}}
