"""Makes the planner's and the status' input from the store: immutable worlds. Also names the keys that a change
concerns."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from pydantic import ValidationError
from treeline_kube.yaml_depth import MOST_DEPTH, is_too_deep
from treeline_wire import labels

from treeline_operator.api.conditions import Reason
from treeline_operator.api.model import InferenceModel
from treeline_operator.api.parts import API_VERSION, Resource, explain
from treeline_operator.api.pool import InferencePool
from treeline_operator.controller.store import MODEL, POOL, Change, Store
from treeline_operator.plan.presets import PresetProblem, resolved
from treeline_operator.status.causes import Cause
from treeline_operator.world import GatewayWorld, Key, Observed, PickerView, Platform, PoolWorld, Ref, Scaling

log = logging.getLogger(__name__)

_ADAPTERS: Final = f'"{labels.ADAPTERS}"'.encode()
_KINDS: Final[dict[str, type[Resource]]] = {POOL: InferencePool, MODEL: InferenceModel}


@dataclass(slots=True)
class Observer:
    """Builds worlds. Typed objects are cached by version, because a gateway looks at all its pools."""

    store: Store
    platform: Platform
    pickers: dict[tuple[str, str], PickerView] = field(default_factory=dict)
    """The last report of each gateway's picker; filled by the picker probe."""
    scaling: dict[tuple[str, str], Scaling] = field(default_factory=dict)
    """The scaling state of each pool; filled by the scaler."""
    silent: dict[tuple[str, str], datetime] = field(default_factory=dict)
    """Gateway → time since which its pickers have not answered; filled by the picker probe."""
    _typed: dict[Ref, tuple[str, Resource | Cause]] = field(default_factory=dict)
    _kept: dict[tuple[str, str], tuple[int, tuple[InferencePool, ...], tuple[Observed, ...]]] = field(
        default_factory=dict
    )
    """The pools of each gateway with the store's number at that time; see `_members`."""

    def pool(self, namespace: str, name: str) -> InferencePool | Cause | None:
        """The pool; why not, where it does not fit our types or its preset; None where it is not there."""
        observed = self.store.get(Ref(API_VERSION, POOL, namespace, name))
        if observed is None:
            return None
        typed = self._parse(observed)
        return typed if isinstance(typed, Cause | InferencePool) else None

    def models(self, namespace: str) -> tuple[InferenceModel, ...]:
        """The namespace's InferenceModels, oldest first."""
        found = (self._parse(observed) for observed in self.store.of_kind(API_VERSION, MODEL, namespace))
        return tuple(sorted((m for m in found if isinstance(m, InferenceModel)), key=_age))

    def unreadable_models(self, namespace: str) -> Iterator[tuple[Observed, Cause]]:
        """The namespace's InferenceModels that do not fit our types, each with its errors."""
        for observed in self.store.of_kind(API_VERSION, MODEL, namespace):
            if isinstance(problem := self._parse(observed), Cause):
                yield observed, problem

    def pools(self, namespace: str) -> tuple[InferencePool, ...]:
        """The namespace's pools, oldest first."""
        return self._pools(self.store.of_kind(API_VERSION, POOL, namespace))

    def adapter_pods(self, namespace: str, pool: str) -> Iterator[Observed]:
        """The pods of a pool that can load adapters while they run."""
        for observed in self.store.pool_children(namespace, pool):
            if observed.ref.kind == "Pod" and _loads_adapters(observed):
                yield observed

    def gateway_world(self, namespace: str, name: str, now: datetime) -> GatewayWorld:
        """A gateway; with no pools if none names it any more."""
        children, pods = _split_pods(self.store.gateway_children(namespace, name))
        pools, unreadable = self._members(namespace, name)
        return GatewayWorld(
            namespace=namespace,
            name=name,
            pools=pools,
            children=children,
            pods=pods,
            platform=self.platform,
            now=now,
            unreadable=unreadable,
            models=self.models(namespace),
        )

    def _members(self, namespace: str, gateway: str) -> tuple[tuple[InferencePool, ...], tuple[Observed, ...]]:
        """Return the pools of a gateway, and its pools that do not fit our types.

        Cached until a pool's spec changes, so that reconciling all pools is linear and not quadratic.
        """
        changes = self.store.spec_changes(namespace, gateway)
        known = self._kept.get((namespace, gateway))
        if known is None or known[0] != changes:
            members = self.store.gateway_pools(namespace, gateway)
            unreadable = tuple(o for o in members if isinstance(self._parse(o), Cause))
            known = changes, self._pools(members), unreadable
            if members and not unreadable:  # what does not fit is reported with its newest version
                self._kept[namespace, gateway] = known
            else:
                self._kept.pop((namespace, gateway), None)
        return known[1], known[2]

    def pool_world(self, pool: InferencePool, now: datetime) -> PoolWorld:
        """A pool and what its plan depends on."""
        namespace, gateway = pool.namespace, pool.spec.gateway.name
        children, pods = _split_pods(self.store.pool_children(namespace, pool.name))
        return PoolWorld(
            pool=pool,
            children=children,
            pods=pods,
            gateway=self.gateway_world(namespace, gateway, now),
            picker=self.pickers.get((namespace, gateway)),
            scaling=self.scaling.get((namespace, pool.name)),
            picker_silent_since=self.silent.get((namespace, gateway)),
            platform=self.platform,
            now=now,
        )

    def all_keys(self) -> Iterator[Key]:
        """Every key to reconcile."""
        for ref, _ in self.store.pools():
            yield Key("pool", ref.namespace, ref.name)
        for namespace, gateway in self.store.gateways():
            yield Key("gateway", namespace, gateway)
        for namespace in self.store.namespaces_of(MODEL):
            yield Key("models", namespace)

    def forget(self, change: Change) -> None:
        """Drop the typed object of a deleted one."""
        if change.after is None:
            self._typed.pop(change.ref, None)

    def _pools(self, observed: Iterable[Observed]) -> tuple[InferencePool, ...]:
        found = (self._parse(o) for o in observed)
        return tuple(sorted((p for p in found if isinstance(p, InferencePool)), key=_age))

    def _parse(self, observed: Observed) -> Resource | Cause:
        version, typed = self._typed.get(observed.ref, ("", None))
        if typed is None or version != observed.resource_version:
            typed = self._read(observed)
            if isinstance(typed, Cause):
                log.warning("%s %s/%s does not fit: %s", observed.ref.kind, *observed.ref[2:], typed.detail)
            self._typed[observed.ref] = (observed.resource_version, typed)
        return typed

    def _read(self, observed: Observed) -> Resource | Cause:
        kind, obj = _KINDS[observed.ref.kind], observed.object
        if is_too_deep(obj.get("spec")):
            return Cause(Reason.SPEC_NOT_UNDERSTOOD, f"spec: it is nested more than {MOST_DEPTH} deep")
        try:
            typed = kind.from_object(obj)
            return resolved(typed, self.platform.presets or {}) if isinstance(typed, InferencePool) else typed
        except ValidationError as exc:
            return Cause(Reason.SPEC_NOT_UNDERSTOOD, explain(exc, kind))
        except PresetProblem as exc:
            return Cause(exc.reason, str(exc))


def keys_for_change(change: Change, store: Store) -> set[Key]:
    """The keys whose plan or status may change with the object."""
    ref = change.ref
    if ref.api_version == API_VERSION and ref.kind == MODEL:
        return {Key("models", ref.namespace), *_pools_of_model(change)}
    if ref.api_version == API_VERSION and ref.kind == POOL:
        keys = {Key("pool", ref.namespace, ref.name)}
        if _intent(change.before) != _intent(change.after):
            keys |= {Key("gateway", ref.namespace, membership.gateway) for membership in change.memberships}
            keys.add(Key("models", ref.namespace))
        return keys  # what this means for other pools of the gateway, its reconciliation finds out and tells them
    keys = set()
    if ref.kind == "Pod" and any(one is not None and _loads_adapters(one) for one in (change.before, change.after)):
        keys.add(Key("models", ref.namespace))
    for membership in change.memberships:
        if membership.pool:
            keys.add(Key("pool", ref.namespace, membership.pool))
        elif membership.gateway and ref.kind == "ConfigMap":
            # It changes with every pool, but does not affect pools.
            keys.add(Key("gateway", ref.namespace, membership.gateway))
        elif membership.gateway:
            keys.add(Key("gateway", ref.namespace, membership.gateway))
            members = store.gateway_pools(ref.namespace, membership.gateway)
            keys |= {Key("pool", ref.namespace, pool.ref.name) for pool in members}
    return keys


def _loads_adapters(pod: Observed) -> bool:
    return _ADAPTERS in pod.body


def _pools_of_model(change: Change) -> Iterator[Key]:
    for observed in (change.before, change.after):
        spec = observed.object.get("spec") or {} if observed is not None else {}
        if name := (spec.get("poolRef") or {}).get("name"):
            yield Key("pool", change.ref.namespace, name)


def _intent(observed: Observed | None) -> object:
    """The desired part of one of our objects, without its status."""
    if observed is None:
        return None
    meta = observed.object["metadata"]
    fields = ("uid", "generation", "labels", "annotations", "deletionTimestamp")
    return [meta.get(name) for name in fields]


def _split_pods(found: list[Observed]) -> tuple[tuple[Observed, ...], tuple[Observed, ...]]:
    """Children, and pods."""
    pods = tuple(o for o in found if o.ref.kind == "Pod")
    return tuple(o for o in found if o.ref.kind != "Pod"), pods


def _age(resource: Resource) -> tuple[datetime, str]:
    return resource.born, resource.name
