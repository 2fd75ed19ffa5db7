"""Which pools share a gateway, whose settings hold for it, and which settings of the others do not."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

import msgspec

from treeline_operator.api.gateway import EndpointPicker, Standalone, Tracing
from treeline_operator.api.pool import InferencePool
from treeline_operator.plan.canonical import canonical

_UNSET: Final = object()
_OF_EACH: Final = "endpointPicker.policy"
"""The picker reads these from each pool: they need not agree."""
_asked: dict[int, tuple[weakref.ref[InferencePool], Mapping[str, Any]]] = {}
"""What pools ask for, by their identity while they live: of hundreds that share a gateway one changes at a time."""
_decided: OrderedDict[tuple[int, ...], tuple[tuple[InferencePool, ...], Mapping[str, SharedGateway]]] = OrderedDict()
"""The last decisions by the pools' identities; the pools are held, so that no identity is given out twice."""
_REMEMBERED: Final = 16


@dataclass(frozen=True, slots=True)
class SharedGateway:
    """The pools that share one gateway, and what was decided for them.

    `members` are in the order in which their settings count: the oldest first, and those that are being deleted
    last, so that the next oldest is promoted as soon as the oldest goes. `conflicts` maps a pool's name to the
    settings of it that do not hold, each a sentence such as "endpointPicker.replicas is 1 here, 2 in pool a
    (older)"; pools without conflicts are not in it.
    """

    name: str
    members: tuple[InferencePool, ...]
    conflicts: Mapping[str, tuple[str, ...]]

    @property
    def owner(self) -> InferencePool:
        """The pool whose settings hold."""
        return self.members[0]

    @property
    def picker(self) -> EndpointPicker:
        """The picker's settings."""
        return self.owner.spec.endpoint_picker

    @property
    def mode(self) -> Literal["standalone", "gateway-api"]:
        """Whether an Envoy of our own serves the pools, or a Gateway that exists."""
        return self.owner.spec.gateway.mode

    @property
    def edge(self) -> Standalone:
        """The settings of our own Envoy; without a meaning in Gateway API mode."""
        return self.owner.spec.gateway.edge

    @property
    def has_clients(self) -> bool:
        """Whether our own Envoy knows its clients by their keys."""
        return self.owner.spec.gateway.has_clients

    @property
    def kept_apart(self) -> bool:
        """Whether each client has a cache of its own."""
        return self.owner.spec.gateway.kept_apart

    @property
    def salts(self) -> bool:
        """Whether the picker writes clients' salts into bodies: an engine here does not read the edge's headers."""
        return self.kept_apart and any(pool.spec.engine.type != "treeline" for pool in self.members)

    @property
    def fails_open(self) -> bool:
        """Whether requests are served while no picker answers. Not where clients are kept apart by the picker alone."""
        return self.picker.failure_mode == "FailOpen" and not self.salts

    @property
    def counts_outputs(self) -> bool:
        """Whether the picker must see responses: a quota that knows no outputs holds nobody who allows them any
        length."""
        flow = self.picker.flow_control
        return flow is not None and flow.quotas is not None

    @property
    def tracing(self) -> Tracing | None:
        """Where picker and Envoy send their spans: pools need not agree."""
        return next((pool.spec.tracing for pool in self.members if pool.spec.tracing is not None), None)

    @property
    def leaving(self) -> bool:
        """Whether every pool is being deleted: then nothing is planned any more, and the rest goes with the last."""
        return self.owner.deleting


def share(pools: Iterable[InferencePool]) -> Mapping[str, SharedGateway]:
    """Decide for the pools of one namespace: their gateways by name. The order in which the pools are given does not
    matter.

    The same pools in the same order (a plan and a status of each of hundreds ask) cost next to nothing.
    """
    given = tuple(pools)
    key = tuple(map(id, given))
    if key not in _decided:
        _decided[key] = given, _share(given)
        if len(_decided) > _REMEMBERED:
            _decided.popitem(last=False)
    return _decided[key][1]


def _share(pools: Iterable[InferencePool]) -> Mapping[str, SharedGateway]:
    by_gateway: dict[str, list[InferencePool]] = {}
    for pool in sorted(pools, key=_precedence):
        by_gateway.setdefault(pool.spec.gateway.name, []).append(pool)
    return {name: _decide(name, by_gateway[name]) for name in sorted(by_gateway)}


def _precedence(pool: InferencePool) -> tuple[bool, datetime, str]:
    return pool.deleting, pool.born, pool.name


def _decide(name: str, members: list[InferencePool]) -> SharedGateway:
    owner, *others = members
    held = _settings(owner)
    conflicts = {pool.name: tuple(_conflicts(pool, held, owner)) for pool in others}
    return SharedGateway(name, tuple(members), {pool: found for pool, found in conflicts.items() if found})


def _settings(pool: InferencePool) -> Mapping[str, Any]:
    """Everything that pools of a gateway must agree on: path → value, unset ones left out."""
    key = id(pool)
    known = _asked.get(key)
    if known is not None and known[0]() is pool:
        return known[1]
    found = _asked_by(pool)
    _asked[key] = weakref.ref(pool, lambda _: _asked.pop(key, None)), found
    return found


def _conflicts(pool: InferencePool, held: Mapping[str, Any], owner: InferencePool) -> Iterator[str]:
    older = "" if pool.deleting and not owner.deleting else " (older)"
    whose = f"in pool {owner.name}{older}"
    asked = _settings(pool)
    if asked == held:
        return
    paths = asked.keys() | held.keys()
    if pool.spec.gateway.mode != owner.spec.gateway.mode:
        paths = {path for path in paths if not path.startswith("gateway.standalone")}
    for path in sorted(paths):
        here, there = asked.get(path, _UNSET), held.get(path, _UNSET)
        if here != there:
            yield f"{path} is {_text(here)} here, {_text(there)} {whose}"


def _asked_by(pool: InferencePool) -> dict[str, Any]:
    gateway = pool.spec.gateway
    found = dict(_leaves("endpointPicker", _plain(pool.spec.endpoint_picker)))
    found = {path: value for path, value in found.items() if not path.startswith(_OF_EACH)}
    if gateway.isolation is not None:
        found["gateway.isolation"] = gateway.isolation
    found["gateway"] = "Gateway API (parentRefs)" if gateway.mode == "gateway-api" else "standalone"
    if gateway.mode == "standalone":
        found |= _leaves("gateway.standalone", _plain(gateway.edge))
    return found


def _plain(part: EndpointPicker | Standalone) -> Any:
    return canonical(part.model_dump(mode="json", by_alias=True))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            # Keys that users invent may have dots in them.
            shown = f"{path}[{key}]" if "." in key or "/" in key else f"{path}.{key}"
            yield from _leaves(shown, inner)
    else:
        yield path, value


def _text(value: Any) -> str:
    if value is _UNSET:
        return "unset"
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
