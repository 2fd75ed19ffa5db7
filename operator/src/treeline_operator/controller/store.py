"""What is known of the cluster: every watched object once, encoded, with the maps by which it is looked up."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
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


class Place(NamedTuple):
    """Where an object belongs: the names that its labels (or a pool's own settings) carry, empty without them."""

    pool: str = ""
    gateway: str = ""


class Change(NamedTuple):
    """One object before and after; None where it was or is absent. The places are those of the two states."""

    ref: Ref
    before: Observed | None
    after: Observed | None
    places: frozenset[Place]


def place_of(obj: dict[str, Any]) -> Place:
    """Where a decoded object belongs."""
    if obj["kind"] == POOL and obj["apiVersion"] == API_VERSION:
        gateway = ((obj.get("spec") or {}).get("gateway") or {}).get("name") or DEFAULT_GATEWAY
        return Place(obj["metadata"]["name"], gateway)
    marks = obj["metadata"].get("labels") or {}
    return Place(marks.get(labels.POOL, ""), marks.get(names.GATEWAY, ""))


@dataclass(slots=True)
class Store:
    """Objects by reference, by kind and namespace, by pool, and by gateway.

    Everything that changes it is told to ``listeners``. An older version than the known one never wins, nor does one
    from before the object went: answers to our own writes and the watch arrive in any order.
    """

    listeners: list[Callable[[Change], None]] = field(default_factory=list)
    _objects: dict[Ref, Observed] = field(default_factory=dict)
    _places: dict[Ref, Place] = field(default_factory=dict)
    _by_kind: dict[tuple[str, str, str], dict[Ref, None]] = field(default_factory=dict)
    _by_pool: dict[tuple[str, str], dict[Ref, None]] = field(default_factory=dict)
    _by_gateway: dict[tuple[str, str], dict[Ref, None]] = field(default_factory=dict)
    _dead: OrderedDict[str, str] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._objects)

    def get(self, ref: Ref) -> Observed | None:
        """The object, or None."""
        return self._objects.get(ref)

    def of_kind(self, api_version: str, kind: str, namespace: str) -> list[Observed]:
        """All of a kind in a namespace, by name."""
        return self._of(self._by_kind.get((api_version, kind, namespace)))

    def pool_children(self, namespace: str, pool: str) -> list[Observed]:
        """What carries the pool's label, pods included."""
        return self._of(self._by_pool.get((namespace, pool)))

    def gateway_children(self, namespace: str, gateway: str) -> list[Observed]:
        """What carries the gateway's label and no pool's, pods included."""
        return self._of(self._by_gateway.get((namespace, gateway)))

    def gateway_pools(self, namespace: str, gateway: str) -> list[Observed]:
        """The pools that name the gateway."""
        pools = self._by_kind.get((API_VERSION, POOL, namespace), {})
        return self._of(ref for ref in pools if self._places[ref].gateway == gateway)

    def pools(self) -> Iterator[tuple[Ref, Place]]:
        """All pools of all namespaces, and where they belong."""
        for ref, place in self._places.items():
            if ref.kind == POOL and ref.api_version == API_VERSION:
                yield ref, place

    def gateways(self) -> set[tuple[str, str]]:
        """Namespace and name of every gateway that a pool names or that has children."""
        return {(ref.namespace, place.gateway) for ref, place in self._places.items() if place.gateway}

    def namespaces_of(self, kind: str) -> set[str]:
        """The namespaces that have an object of one of our own kinds."""
        return {
            ns
            for (version, k, ns), refs in self._by_kind.items()
            if version == API_VERSION and k == kind and refs
        }

    def put(self, obj: dict[str, Any], *, tell: bool = True) -> bool:
        """Take in a decoded object; returns whether that was news. Its ``managedFields`` are dropped.

        Without ``tell`` the listeners hear of it only if the spec is another than the known one.
        """
        observed = Observed.of(obj)
        before = self._objects.get(observed.ref)
        if before is not None and not _newer(observed, before):
            return False
        if (died := self._dead.get(observed.uid)) is not None:
            if not _after(observed.resource_version, died):
                return False
            del self._dead[observed.uid]  # it had only lost the label by which we watch
        if before is not None and before.uid != observed.uid:
            self._bury(before.uid, observed.resource_version)
        place = place_of(obj)
        old_place = self._places.get(observed.ref)
        if old_place is not None and old_place != place:
            self._unplace(observed.ref, old_place)
        self._objects[observed.ref] = observed
        self._place(observed.ref, place)
        if tell or before is None or _generation(before.object) != _generation(obj):
            self._tell(
                Change(
                    observed.ref, before, observed, frozenset(p for p in (old_place, place) if p is not None)
                )
            )
        return True

    def remove(self, ref: Ref, uid: str, version: str) -> bool:
        """The object with this uid is gone since ``version``; returns whether it was known."""
        self._bury(uid, version)
        before = self._objects.get(ref)
        if before is None or before.uid != uid:
            return False
        self._drop(before)
        return True

    def doom(self, ref: Ref, uid: str, stamp: str) -> None:
        """We asked for the deletion of the object: until the watch says so, its copy says that it is under way."""
        observed = self._objects.get(ref)
        if observed is None or observed.uid != uid:
            return
        obj = observed.object
        obj["metadata"].setdefault("deletionTimestamp", stamp)
        self._objects[ref] = Observed.of(obj)

    def has_seen(self, ref: Ref, uid: str, version: str) -> bool:
        """Whether this version of the object, a later one or its end is known."""
        known = self._objects.get(ref)
        return uid in self._dead if known is None else not _after(version, known.resource_version)

    def retain(self, api_version: str, kind: str, namespace: str, uids: set[str], version: str) -> int:
        """A list at ``version`` has ended and had just these ``uids``: drop what else is known of the kind.

        An empty ``namespace`` means all. What is newer than the list stays: we made it after the list was taken.
        Without a ``version`` nothing was listed: the kind cannot be read any more, and its objects may come back.
        """
        spaces = (
            [namespace] if namespace else [ns for v, k, ns in self._by_kind if (v, k) == (api_version, kind)]
        )
        gone = [
            observed
            for ns in spaces
            for ref in self._by_kind.get((api_version, kind, ns), ())
            if (observed := self._objects[ref]).uid not in uids
            and not _after(observed.resource_version, version)
        ]
        for observed in gone:
            if version:
                self._bury(observed.uid, version)
            self._drop(observed)
        return len(gone)

    def _drop(self, known: Observed) -> None:
        ref, place = known.ref, self._places[known.ref]
        self._unplace(ref, place)
        del self._objects[ref]
        del self._places[ref]
        self._tell(Change(ref, known, None, frozenset((place,))))

    def _of(self, refs: Iterable[Ref] | None) -> list[Observed]:
        return [self._objects[ref] for ref in sorted(refs or ())]

    def _tell(self, change: Change) -> None:
        for listener in self.listeners:
            listener(change)

    def _place(self, ref: Ref, place: Place) -> None:
        self._places[ref] = place
        for index, key in self._keys(ref, place):
            index.setdefault(key, {})[ref] = None

    def _unplace(self, ref: Ref, place: Place) -> None:
        for index, key in self._keys(ref, place):
            members = index.get(key, {})
            members.pop(ref, None)
            if not members:
                index.pop(key, None)

    def _keys(self, ref: Ref, place: Place) -> Iterator[tuple[dict[Any, dict[Ref, None]], tuple[str, ...]]]:
        yield self._by_kind, (ref.api_version, ref.kind, ref.namespace)
        if ref.kind in (POOL, MODEL) and ref.api_version == API_VERSION:
            return
        if place.pool:
            yield self._by_pool, (ref.namespace, place.pool)
        elif place.gateway:
            yield self._by_gateway, (ref.namespace, place.gateway)

    def _bury(self, uid: str, version: str) -> None:
        self._dead[uid] = version
        if len(self._dead) > _TOMBSTONES:
            self._dead.popitem(last=False)


def _generation(obj: dict[str, Any]) -> object:
    return obj["metadata"]["uid"], obj["metadata"].get("generation")


def _newer(candidate: Observed, known: Observed) -> bool:
    versions = candidate.resource_version, known.resource_version
    return versions[0] != versions[1] and not _after(known.resource_version, candidate.resource_version)


def _after(version: str, other: str) -> bool:
    """Whether a resource version is later than another: they are integers that grow, wherever etcd keeps them."""
    try:
        return int(version) > int(other)
    except ValueError:
        return False
