"""Decides which pools share a gateway, whose settings apply, and which settings of the others do not."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Final, Literal

import msgspec

from treeline_operator.api.gateway import EndpointPicker, PickerTls, Standalone, Tls, Tracing
from treeline_operator.api.parts import NamedRef
from treeline_operator.api.pool import InferencePool
from treeline_operator.plan.canonical import canonical

FIELDS: Final = {
    "ApiKeys": "gateway.standalone.apiKeysSecretRef.name",
    "Tls": "gateway.standalone.tls.secretRef.name",
    "PickerTls": "gateway.standalone.pickerTls.secretRef.name",
    "Isolation": "gateway.isolation",
    "FailClose": "endpointPicker.failureMode",
}
"""Each protection, and the field of a pool that states it."""


class Protection(msgspec.Struct, frozen=True):
    """A protection in force: the Secret that it uses, if any, and the uids of the pools that stated it."""

    secret: str
    pools: tuple[str, ...]


Protections = Mapping[str, Protection]

_decode = msgspec.json.Decoder(dict[str, Protection]).decode


def read(record: str) -> Protections:
    """The record of an anchor; empty if it is unreadable."""
    try:
        return _decode(record) if record else {}
    except msgspec.DecodeError:
        return {}


def written(protections: Protections) -> str:
    """The record for the anchor."""
    return msgspec.json.encode(protections, order="sorted").decode()


def stated(pool: InferencePool) -> dict[str, str]:
    """The protections that a pool states, each with the name of its Secret, or with nothing."""
    gateway, edge = pool.spec.gateway, pool.spec.gateway.edge
    secrets = {
        "ApiKeys": edge.api_keys_secret_ref,
        "Tls": None if edge.tls is None else edge.tls.secret_ref,
        "PickerTls": None if edge.picker_tls is None else edge.picker_tls.secret_ref,
    }
    found = {name: ref.name for name, ref in secrets.items() if ref is not None}
    holds = {"Isolation": gateway.kept_apart, "FailClose": pool.spec.endpoint_picker.failure_mode == "FailClose"}
    return found | {name: "" for name, held in holds.items() if held}


def in_force(members: Collection[InferencePool], before: Protections) -> dict[str, Protection]:
    """The protections of a gateway, from its pools, the oldest first, and from the record.

    Of several Secrets the oldest pool's applies. A pool that removes its own setting drops the protection; a pool that
    is deleted or moves to another gateway does not.
    """
    found: dict[str, Protection] = {}
    for pool in members:
        for name, secret in stated(pool).items():
            known = found.get(name, Protection(secret, ()))
            found[name] = Protection(known.secret, (*known.pools, pool.metadata.uid))
    there = {pool.metadata.uid for pool in members}
    off = {name for pool in members for name in pool.spec.gateway.unprotected}
    kept = {name: one for name, one in before.items() if name in FIELDS and not there.issuperset(one.pools)}
    return {**{name: one for name, one in kept.items() if name not in off}, **found}


def retained(protections: Protections, members: Collection[InferencePool]) -> list[str]:
    """The protections in force that no pool states any more."""
    there = {name for pool in members for name in stated(pool)}
    return [name for name in FIELDS if name in protections and name not in there]


_UNSET: Final = object()
_OF_EACH: Final = "endpointPicker.policy"
"""The picker reads these from each pool: they need not agree."""


@dataclass(frozen=True)
class SharedGateway:
    """The pools of one gateway, and the decisions for them.

    `protections` are in force. `members` are in order of precedence: the oldest first, and those that are being
    deleted last, so the next oldest takes over at once. `conflicts` maps a pool's name to its settings that do not
    apply, each a sentence such as "endpointPicker.replicas is 1 here, 2 in pool a (older)"; pools without conflicts are
    not in it.
    """

    name: str
    members: tuple[InferencePool, ...]
    protections: Protections

    @property
    def owner(self) -> InferencePool:
        """The pool whose settings apply, except for the protections."""
        return self.members[0]

    @cached_property
    def conflicts(self) -> Mapping[str, tuple[str, ...]]:
        """Pool → its settings that do not apply, for pools with any."""
        found = {pool.name: self.conflicts_of(pool) for pool in self.members}
        return {pool: conflicts for pool, conflicts in found.items() if conflicts}

    def conflicts_of(self, pool: InferencePool) -> tuple[str, ...]:
        """The settings of a member that do not apply."""
        return tuple(_conflicts(pool, self))

    @cached_property
    def owner_settings(self) -> Mapping[str, Any]:
        """The owner's settings: path → value."""
        return _settings(self.owner)

    @cached_property
    def held(self) -> Mapping[str, Any]:
        """The settings in force: path → value."""
        held = {**self.owner_settings, FIELDS["FailClose"]: self.failure_mode}
        if self.mode == "standalone":
            for name in ("ApiKeys", "Tls", "PickerTls"):
                held.pop(FIELDS[name], None)
                if (one := self.protections.get(name)) is not None:
                    held[FIELDS[name]] = one.secret
            if self.has_clients:
                held[FIELDS["Isolation"]] = "PerKey" if self.kept_apart else "Shared"
        return held

    @property
    def retained(self) -> list[str]:
        """The protections that no pool states any more, and that are in force all the same."""
        return retained(self.protections, self.members)

    @property
    def failure_mode(self) -> Literal["FailOpen", "FailClose"]:
        """The failure mode that the pools ask for."""
        return "FailClose" if "FailClose" in self.protections else "FailOpen"

    @property
    def picker(self) -> EndpointPicker:
        """The picker's settings."""
        return self.owner.spec.endpoint_picker

    @property
    def mode(self) -> Literal["standalone", "gateway-api"]:
        """Whether our own Envoy or an existing Gateway serves the pools."""
        return self.owner.spec.gateway.mode

    @cached_property
    def edge(self) -> Standalone:
        """The settings of our own Envoy; without a meaning in Gateway API mode."""
        secrets = {name: NamedRef(name=one.secret) for name, one in self.protections.items() if one.secret}
        keys, tls, picker_tls = (secrets.get(name) for name in ("ApiKeys", "Tls", "PickerTls"))
        protected = {
            "api_keys_secret_ref": keys,
            "tls": tls and Tls(secret_ref=tls),
            "picker_tls": picker_tls and PickerTls(secret_ref=picker_tls),
        }
        return self.owner.spec.gateway.edge.model_copy(update=protected)

    @property
    def has_clients(self) -> bool:
        """Whether our own Envoy identifies clients by API keys."""
        return self.mode == "standalone" and "ApiKeys" in self.protections

    @property
    def kept_apart(self) -> bool:
        """Whether each client has its own cache."""
        return self.has_clients and "Isolation" in self.protections

    @property
    def salts(self) -> bool:
        """Whether the picker writes clients' salts into bodies, because an engine does not read the edge's headers."""
        return self.kept_apart and any(pool.spec.engine.type != "treeline" for pool in self.members)

    @property
    def fails_open(self) -> bool:
        """Whether requests are served while no picker answers. Not if only the picker isolates clients."""
        return self.failure_mode == "FailOpen" and not self.salts

    @property
    def counts_outputs(self) -> bool:
        """Whether the picker must see responses: without outputs a quota would not bound clients that allow long
        ones."""
        flow = self.picker.flow_control
        return flow is not None and flow.quotas is not None

    @property
    def tracing(self) -> Tracing | None:
        """The collector of picker and Envoy. Another pool's collector gets only its own pods' spans, since the gateway
        sees all pools' requests."""
        return self.owner.spec.tracing

    @property
    def leaving(self) -> bool:
        """Whether every pool is being deleted: then nothing is planned, and the rest is deleted with the last."""
        return self.owner.deleting


def share(pools: Iterable[InferencePool], record: str = "") -> Mapping[str, SharedGateway]:
    """Decide for the pools of one namespace: gateways by name. The order of the pools does not matter. `record` is the
    protections in the gateway's anchor; then all pools belong to one gateway."""
    before = read(record)
    by_gateway: dict[str, list[InferencePool]] = {}
    for pool in sorted(pools, key=_precedence):
        by_gateway.setdefault(pool.spec.gateway.name, []).append(pool)
    return {
        name: SharedGateway(name, tuple(members), in_force(members, before))
        for name, members in sorted(by_gateway.items())
    }


def _precedence(pool: InferencePool) -> tuple[bool, datetime, str]:
    return pool.deleting, pool.born, pool.name


def _conflicts(pool: InferencePool, shared: SharedGateway) -> Iterator[str]:
    own, owner, tracing = pool.spec, shared.owner.spec, pool.spec.tracing
    # Most of the hundreds of pools on a gateway have the owner's settings.
    same = own.gateway == owner.gateway and own.endpoint_picker == owner.endpoint_picker
    asked, held = shared.owner_settings if same else _settings(pool), shared.held
    if tracing is not None and tracing != shared.tracing:
        there = _UNSET if shared.tracing is None else shared.tracing.endpoint
        yield f"tracing.endpoint is {tracing.endpoint} here, {_text(there)} {_whose('', pool, shared)}"
    if asked == held:
        return
    paths = asked.keys() | held.keys()
    if pool.spec.gateway.mode != shared.mode:
        paths = {path for path in paths if not path.startswith("gateway.standalone")}
    if not (FIELDS["Isolation"] in asked and FIELDS["Isolation"] in held):
        paths -= {FIELDS["Isolation"]}  # without keys no client is isolated, and the keys are reported
    for path in sorted(paths):
        here, there = asked.get(path, _UNSET), held.get(path, _UNSET)
        if here != there:
            yield f"{path} is {_text(here)} here, {_text(there)} {_whose(path, pool, shared)}"


def _whose(path: str, pool: InferencePool, shared: SharedGateway) -> str:
    """The source of the value in force."""
    found = shared.owner
    for name, field in FIELDS.items():
        if field == path and name in shared.protections:
            stating = shared.protections[name].pools
            if (pool_of := next((one for one in shared.members if one.metadata.uid in stating), None)) is None:
                return f"by a deleted pool; gateway.unprotected: [{name}] drops it"
            found = pool_of
    how = "older" if _precedence(found) < _precedence(pool) else "stricter"
    return f"in pool {found.name}" + ("" if pool.deleting and not found.deleting else f" ({how})")


def _settings(pool: InferencePool) -> Mapping[str, Any]:
    """The settings that pools of a gateway must agree on: path → value, without unset ones."""
    gateway = pool.spec.gateway
    found = dict(_leaves("endpointPicker", _plain(pool.spec.endpoint_picker)))
    found = {path: value for path, value in found.items() if not path.startswith(_OF_EACH)}
    if gateway.isolation is not None or gateway.has_clients:
        found[FIELDS["Isolation"]] = "PerKey" if gateway.kept_apart else "Shared"
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
