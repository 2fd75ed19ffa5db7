"""Conversion of InferencePools, of two API groups, to the picker's pools. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec
from msgspec.structs import replace
from treeline_wire import labels
from treeline_wire.models import PoolClaim, served_name

from treeline_epp.kube.objects import OwnPool, Specified, UpstreamPoolSpec

OWN_GROUP = "treeline.dev"
UPSTREAM_GROUP = "inference.networking.k8s.io"
VERSIONS = {OWN_GROUP: "v1alpha1", UPSTREAM_GROUP: "v1"}
"""The version of each group's InferencePool that the picker reads."""


class Pool(msgspec.Struct, frozen=True):
    """A pool: the labels of its pods, and the ports on which they serve.

    `ranks`: every port is an endpoint of its own, named `<pod>-rank-<i>`, as other endpoint pickers name them.
    `models` are the names that it is configured to serve, `adapters` those of its adapters; empty where the object does
    not say. `trust_ready`: a pod that is Ready gets requests, even if its engine answers none of our probes.
    `engine` is the type of its engines, empty where the object does not say; `policy` is its policy, in the form of
    `--policy`.
    """

    name: str
    selector: Mapping[str, str]
    ports: tuple[int, ...]
    models: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    gateway: str = ""
    ranks: bool = False
    trust_ready: bool = False
    created: str = ""
    engine: str = ""
    policy: str = ""

    @property
    def claim(self) -> PoolClaim:
        """The names that it claims behind its gateway."""
        return PoolClaim(self.gateway, self.models, self.adapters, self.created)

    def matches(self, pod_labels: Mapping[str, str]) -> bool:
        """Return whether these are the labels of one of its pods. An empty selector has none."""
        wanted = self.selector.items()
        return bool(wanted) and all(pod_labels.get(key) == value for key, value in wanted)


def own_pool(data: msgspec.Raw) -> Pool:
    """Parse an InferencePool of treeline.dev. Raises `msgspec.MsgspecError`."""
    found = _own(data)
    spec, meta = found.spec, found.metadata
    pool = Pool(
        meta.name,
        {labels.POOL: meta.name},
        (spec.engine.port,),
        models=(served_name(spec.model.name, spec.model.uri),),
        adapters=tuple(adapter.name for adapter in spec.engine.adapters or ()),
        gateway=spec.gateway.name,
        created=meta.creation_timestamp or "",
        engine=spec.engine.type,
        policy=_policy(spec.endpoint_picker.policy, spec.endpoint_picker.policy_parameters or {}),
    )
    told = found.status.preset
    if told is None or told.name != spec.preset:
        return pool
    adapters = tuple(told.adapters)
    return replace(pool, ports=(told.port,), adapters=adapters, engine=told.engine, policy=told.policy)


def upstream_pool(data: msgspec.Raw) -> Pool:
    """Parse an InferencePool of inference.networking.k8s.io. Raises `msgspec.MsgspecError`."""
    found = _upstream(data)
    ports = tuple(dict.fromkeys(port.number for port in found.spec.target_ports))
    return _foreign(found.metadata.name, found.spec.selector.match_labels or {}, ports)


def selected_pods(selector: Mapping[str, str], ports: Iterable[int]) -> Pool:
    """Return the pool of `--endpoint-selector`, which has no InferencePool object."""
    return _foreign("default", dict(selector), tuple(dict.fromkeys(ports)))


def in_order(pools: Iterable[Pool]) -> list[Pool]:
    """Sort pools, the oldest first, since a name that two pools serve is the older one's."""
    return sorted(pools, key=lambda pool: (pool.created, pool.name))


def _policy(name: str, parameters: Mapping[str, object]) -> str:
    """Return a policy in the form of `--policy`; our API has its parameters in camelCase."""
    names = {key: re.sub("[A-Z]", lambda found: "_" + found[0].lower(), key) for key in parameters}
    given = ",".join(f"{names[key]}={value}" for key, value in parameters.items())
    return f"{name}:{given}" if name and given else name


def _foreign(name: str, selector: Mapping[str, str], ports: tuple[int, ...]) -> Pool:
    return Pool(name, selector, ports, ranks=True, trust_ready=True)


_own = msgspec.json.Decoder(OwnPool).decode
_upstream = msgspec.json.Decoder(Specified[UpstreamPoolSpec]).decode
