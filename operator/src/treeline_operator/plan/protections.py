"""What protects a gateway, and whose word on it holds: API keys, TLS, caches kept apart, refusing without a picker.

Of the pools that share a gateway the strictest statement holds. What a pool stated stays in force when the pool goes,
until another pool states it or lists it in `gateway.unprotected`. The gateway's anchor records what is in force.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import msgspec

from treeline_operator.api.pool import InferencePool

FIELDS: Final = {
    "ApiKeys": "gateway.standalone.apiKeysSecretRef.name",
    "Tls": "gateway.standalone.tls.secretRef.name",
    "PickerTls": "gateway.standalone.pickerTls.secretRef.name",
    "Isolation": "gateway.isolation",
    "FailClose": "endpointPicker.failureMode",
}
"""Each protection, and the field of a pool that states it."""


class Protection(msgspec.Struct, frozen=True):
    """One that is in force: the Secret that it uses, if any, and the uids of the pools that stated it."""

    secret: str
    pools: tuple[str, ...]


Protections = Mapping[str, Protection]

_decode = msgspec.json.Decoder(dict[str, Protection]).decode


def read(record: str) -> Protections:
    """What an anchor records. Nothing where somebody has put something else there."""
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
    """The protections of a gateway, by the pools that share it, the oldest first, and by what was in force before.

    Of several Secrets that of the oldest pool holds. A pool that takes its own statement back while it is there drops
    the protection; one that is deleted or goes to another gateway does not.
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
    """Those that no pool states any more."""
    there = {name for pool in members for name in stated(pool)}
    return [name for name in FIELDS if name in protections and name not in there]
