"""The parts of Kubernetes objects that the picker reads: typed fragments; other fields are skipped while decoding."""

from __future__ import annotations

from typing import Generic, TypeVar, get_args

import msgspec
from treeline_wire.models import Criticality, ModelRule

S = TypeVar("S")


class Metadata(msgspec.Struct, rename="camel"):
    """The part of `metadata` that the picker reads."""

    name: str
    uid: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class Condition(msgspec.Struct):
    """One entry of `status.conditions`."""

    type: str
    status: str


class ContainerStatus(msgspec.Struct, rename="camel"):
    """One entry of `status.containerStatuses`."""

    name: str
    restart_count: int = 0


class PodStatus(msgspec.Struct, rename="camel"):
    """The part of a pod's status that the picker reads."""

    phase: str = ""
    pod_ip: str | None = msgspec.field(default=None, name="podIP")
    conditions: list[Condition] | None = None
    container_statuses: list[ContainerStatus] | None = None


class Container(msgspec.Struct):
    """The command line of a container's program."""

    command: list[str] | None = None
    args: list[str] | None = None


class PodSpec(msgspec.Struct):
    """The part of a pod's spec that the picker reads."""

    containers: list[Container] = []


class Pod(msgspec.Struct):
    """A pod. Its HTTP ports come from the pool."""

    metadata: Metadata
    spec: PodSpec = msgspec.field(default_factory=PodSpec)
    status: PodStatus = msgspec.field(default_factory=PodStatus)


class Specified(msgspec.Struct, Generic[S]):
    """An object with its spec."""

    metadata: Metadata
    spec: S


class _GatewayRef(msgspec.Struct):
    name: str = "treeline"


class _ModelSource(msgspec.Struct):
    uri: str = ""
    name: str | None = None


class _Adapter(msgspec.Struct):
    name: str


class _Engine(msgspec.Struct):
    port: int = 8000
    type: str = "treeline"
    adapters: list[_Adapter] | None = None


class _EndpointPicker(msgspec.Struct, rename="camel"):
    policy: str = ""
    policy_parameters: dict[str, str | int | float | bool] | None = None


class OwnPoolSpec(msgspec.Struct):
    """`spec` of an InferencePool of treeline.dev/v1alpha1."""

    model: _ModelSource = msgspec.field(default_factory=_ModelSource)
    engine: _Engine = msgspec.field(default_factory=_Engine)
    gateway: _GatewayRef = msgspec.field(default_factory=_GatewayRef)
    endpoint_picker: _EndpointPicker = msgspec.field(name="endpointPicker", default_factory=_EndpointPicker)
    preset: str | None = None


class _Preset(msgspec.Struct):
    name: str
    engine: str
    port: int
    adapters: list[str] = []
    policy: str = ""


class _OwnPoolStatus(msgspec.Struct):
    preset: _Preset | None = None


class OwnPool(Specified[OwnPoolSpec]):
    """An InferencePool of treeline.dev/v1alpha1. Its status has the values that the operator takes from its preset."""

    status: _OwnPoolStatus = msgspec.field(default_factory=_OwnPoolStatus)


class _LabelSelector(msgspec.Struct, rename="camel"):
    match_labels: dict[str, str] | None = None


class _TargetPort(msgspec.Struct):
    number: int


class UpstreamPoolSpec(msgspec.Struct, rename="camel"):
    """`spec` of an InferencePool of inference.networking.k8s.io/v1."""

    selector: _LabelSelector = msgspec.field(default_factory=_LabelSelector)
    target_ports: list[_TargetPort] = []


class _Ref(msgspec.Struct):
    name: str
    group: str = ""


class _Target(msgspec.Struct):
    name: str
    weight: int | None = None


class ModelSpec(msgspec.Struct, rename="camel"):
    """`spec` of an InferenceModel of treeline.dev/v1alpha1."""

    model_name: str
    pool_ref: _Ref
    criticality: str | None = None
    target_models: list[_Target] | None = None
    fallback_pools: list[_Ref] | None = None
    adapter: dict[str, object] | None = None


class _AdapterStatus(msgspec.Struct):
    name: str = ""


class _ModelStatus(msgspec.Struct):
    adapter: _AdapterStatus | None = None


class _Model(Specified[ModelSpec]):
    status: _ModelStatus | None = None


def read_model(data: msgspec.Raw) -> ModelRule | None:
    """Parse an InferenceModel; `None` while it is being deleted. Raises `msgspec.MsgspecError`.

    Deleting one takes its name away at once, even while a finalizer keeps the object: the operator does the same.
    """
    found = _decode_model(data)
    meta, spec = found.metadata, found.spec
    if meta.deletion_timestamp is not None:
        return None
    served = found.status.adapter if found.status is not None else None
    return ModelRule(
        name=meta.name,
        model_name=spec.model_name,
        pool=spec.pool_ref.name,
        criticality=_CRITICALITY.get(spec.criticality or "", "Standard"),
        targets=tuple((target.name, target.weight) for target in spec.target_models or ()),
        fallback_pools=tuple(ref.name for ref in spec.fallback_pools or ()),
        created=meta.creation_timestamp or "",
        uid=meta.uid,
        # Until one is loaded, the name is nobody's: the model without the adapter must not answer.
        adapter=None if spec.adapter is None else (served and served.name) or f"{spec.model_name}@",
    )


_CRITICALITY: dict[str, Criticality] = {name: name for name in get_args(Criticality)}
_decode_model = msgspec.json.Decoder(_Model).decode
