"""Every watched object, encoded, with indexes."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from treeline_wire import labels

from treeline_operator import names
from treeline_operator.api.parts import API_VERSION
from treeline_operator.world import Observed, Ref

POOL: Final = "InferencePool"
MODEL: Final = "InferenceModel"
DEFAULT_GATEWAY: Final = "treeline"

_TOMBSTONES: Final = 4096


class Membership(NamedTuple):
    """The pool and gateway that an object belongs to, by its labels (or a pool's settings); empty without them."""

    pool: str = ""
    gateway: str = ""


class Change(NamedTuple):
    """One object before and after a change; None if absent then. `memberships`: of both states."""

    ref: Ref
    before: Observed | None
    after: Observed | None
    memberships: frozenset[Membership]


def membership_of(obj: dict[str, Any]) -> Membership:
    """The membership of a decoded object."""
    if obj["kind"] == POOL and obj["apiVersion"] == API_VERSION:
        gateway = ((obj.get("spec") or {}).get("gateway") or {}).get("name") or DEFAULT_GATEWAY
        return Membership(obj["metadata"]["name"], gateway)
    marks = obj["metadata"].get("labels") or {}
    return Membership(marks.get(labels.POOL, ""), marks.get(names.GATEWAY, ""))


@dataclass(slots=True)
class Store:
    """Objects by reference, by kind and namespace, by pool, and by gateway.

    `listeners` are called with every change. Newer versions win, and deleted objects stay deleted: responses to our
    writes and watch events may arrive in any order.
    """

    listeners: list[Callable[[Change], None]] = field(default_factory=list)
    _objects: dict[Ref, Observed] = field(default_factory=dict)
    _memberships: dict[Ref, Membership] = field(default_factory=dict)
    _by_kind: dict[tuple[str, str, str], dict[Ref, None]] = field(default_factory=dict)
    _by_pool: dict[tuple[str, str], dict[Ref, None]] = field(default_factory=dict)
    _by_gateway: dict[tuple[str, str], dict[Ref, None]] = field(default_factory=dict)
    _gateway_pools: dict[tuple[str, str], dict[Ref, None]] = field(default_factory=dict)  # its pools
    _spec_changes: Counter[tuple[str, str]] = field(default_factory=Counter)  # changes of their specs
    _tombstones: OrderedDict[str, str] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._objects)

    def get(self, ref: Ref) -> Observed | None:
        """The object, or None."""
        return self._objects.get(ref)

    def of_kind(self, api_version: str, kind: str, namespace: str) -> list[Observed]:
        """All of a kind in a namespace, by name."""
        return self._of(self._by_kind.get((api_version, kind, namespace)))

    def pool_children(self, namespace: str, pool: str) -> list[Observed]:
        """Objects with the pool's label, pods included."""
        return self._of(self._by_pool.get((namespace, pool)))

    def gateway_children(self, namespace: str, gateway: str) -> list[Observed]:
        """Objects with the gateway's label but no pool's, pods included."""
        return self._of(self._by_gateway.get((namespace, gateway)))

    def gateway_pools(self, namespace: str, gateway: str) -> list[Observed]:
        """The pools that name the gateway. O(these pools)."""
        return self._of(self._gateway_pools.get((namespace, gateway)))

    def spec_changes(self, namespace: str, gateway: str) -> int:
        """A number that is another one whenever a pool that names the gateway comes, goes, or asks for something else;
        statuses do not change it. O(1)."""
        return self._spec_changes[namespace, gateway]

    def pools(self) -> Iterator[tuple[Ref, Membership]]:
        """All pools of all namespaces, and where they belong."""
        for ref, membership in self._memberships.items():
            if ref.kind == POOL and ref.api_version == API_VERSION:
                yield ref, membership

    def gateways(self) -> set[tuple[str, str]]:
        """Namespace and name of every gateway that a pool names or that has children."""
        return {
            (ref.namespace, membership.gateway) for ref, membership in self._memberships.items() if membership.gateway
        }

    def namespaces_of(self, kind: str) -> set[str]:
        """The namespaces that have an object of one of our own kinds."""
        return {ns for (version, k, ns), refs in self._by_kind.items() if version == API_VERSION and k == kind and refs}

    def put(self, obj: dict[str, Any], *, notify: bool = True) -> bool:
        """Store a decoded object without `managedFields`; returns whether it changed.

        Without `notify` listeners are called only if the spec changed.
        """
        observed = Observed.of(obj)
        before = self._objects.get(observed.ref)
        if before is not None and not _newer(observed, before):
            return False
        if (died := self._tombstones.get(observed.uid)) is not None:
            if not _after(observed.resource_version, died):
                return False
            del self._tombstones[observed.uid]  # it had only lost the label by which we watch
        if before is not None and before.uid != observed.uid:
            self._tombstone(before.uid, observed.resource_version)
        membership = membership_of(obj)
        old_membership = self._memberships.get(observed.ref)
        if old_membership is not None and old_membership != membership:
            self._unindex(observed.ref, old_membership)
            self._count_spec_change(observed.ref, old_membership)
        self._objects[observed.ref] = observed
        self._index(observed.ref, membership)
        if before is None or old_membership != membership or _spec(before.object) != _spec(obj):
            self._count_spec_change(observed.ref, membership)
        if notify or before is None or _generation(before.object) != _generation(obj):
            memberships = frozenset(m for m in (old_membership, membership) if m is not None)
            self._notify(Change(observed.ref, before, observed, memberships))
        return True

    def remove(self, ref: Ref, uid: str, version: str) -> bool:
        """The object with this uid was deleted at `version`; returns whether it was known."""
        self._tombstone(uid, version)
        before = self._objects.get(ref)
        if before is None or before.uid != uid:
            return False
        self._drop(before)
        return True

    def mark_deleting(self, ref: Ref, uid: str, stamp: str) -> None:
        """We deleted the object: until the watch reports it, its copy says that deletion is under way."""
        observed = self._objects.get(ref)
        if observed is None or observed.uid != uid:
            return
        obj = observed.object
        obj["metadata"].setdefault("deletionTimestamp", stamp)
        self._objects[ref] = Observed.of(obj)

    def retain(self, api_version: str, kind: str, namespace: str, uids: set[str], version: str) -> int:
        """A list at `version` ended with just these `uids`: drop other objects of the kind.

        An empty `namespace` means all. Newer objects stay, because we made them after the list was taken. Without a
        `version` the kind cannot be read any more, and its objects may come back.
        """
        spaces = [namespace] if namespace else [ns for v, k, ns in self._by_kind if (v, k) == (api_version, kind)]
        gone = [
            observed
            for ns in spaces
            for ref in self._by_kind.get((api_version, kind, ns), ())
            if (observed := self._objects[ref]).uid not in uids and not _after(observed.resource_version, version)
        ]
        for observed in gone:
            if version:
                self._tombstone(observed.uid, version)
            self._drop(observed)
        return len(gone)

    def _count_spec_change(self, ref: Ref, membership: Membership) -> None:
        if ref.kind == POOL and ref.api_version == API_VERSION:
            self._spec_changes[ref.namespace, membership.gateway] += 1

    def _drop(self, known: Observed) -> None:
        ref, membership = known.ref, self._memberships[known.ref]
        self._unindex(ref, membership)
        self._count_spec_change(ref, membership)
        del self._objects[ref]
        del self._memberships[ref]
        self._notify(Change(ref, known, None, frozenset((membership,))))

    def _of(self, refs: Iterable[Ref] | None) -> list[Observed]:
        return [self._objects[ref] for ref in sorted(refs or ())]

    def _notify(self, change: Change) -> None:
        for listener in self.listeners:
            listener(change)

    def _index(self, ref: Ref, membership: Membership) -> None:
        self._memberships[ref] = membership
        for index, key in self._keys(ref, membership):
            index.setdefault(key, {})[ref] = None

    def _unindex(self, ref: Ref, membership: Membership) -> None:
        for index, key in self._keys(ref, membership):
            members = index.get(key, {})
            members.pop(ref, None)
            if not members:
                index.pop(key, None)

    def _keys(self, ref: Ref, membership: Membership) -> Iterator[tuple[dict[Any, dict[Ref, None]], tuple[str, ...]]]:
        yield self._by_kind, (ref.api_version, ref.kind, ref.namespace)
        if ref.kind in (POOL, MODEL) and ref.api_version == API_VERSION:
            if ref.kind == POOL:
                yield self._gateway_pools, (ref.namespace, membership.gateway)
            return
        if membership.pool:
            yield self._by_pool, (ref.namespace, membership.pool)
        elif membership.gateway:
            yield self._by_gateway, (ref.namespace, membership.gateway)

    def _tombstone(self, uid: str, version: str) -> None:
        self._tombstones[uid] = version
        if len(self._tombstones) > _TOMBSTONES:
            self._tombstones.popitem(last=False)


def _generation(obj: dict[str, Any]) -> object:
    return obj["metadata"]["uid"], obj["metadata"].get("generation")


def _spec(obj: Mapping[str, Any]) -> object:
    meta = obj["metadata"]
    return meta.get("uid"), meta.get("generation"), meta.get("deletionTimestamp"), obj.get("spec")


def _newer(candidate: Observed, known: Observed) -> bool:
    versions = candidate.resource_version, known.resource_version
    return versions[0] != versions[1] and not _after(known.resource_version, candidate.resource_version)


def _after(version: str, other: str) -> bool:
    """Whether a resource version is later than another: they are growing integers where etcd stores them."""
    try:
        return int(version) > int(other)
    except ValueError:
        return False
