"""Owns the InferencePool: a model served by a set of equal pods behind one URL."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

from pydantic import Field, StrictInt, StringConstraints, WithJsonSchema
from typing_extensions import TypedDict

from treeline_operator.api.engine import SETTINGS, Accelerator, Adapter, Engine, EngineType
from treeline_operator.api.gateway import EndpointPicker, Gateway, ParentRef, PickerParameters, Standalone
from treeline_operator.api.lifecycle import Autoscaling, Drain, Role, Rollout
from treeline_operator.api.parts import (
    BY_TYPE,
    DOCUMENTED,
    FOREIGN,
    LIST_MAP,
    SHORT_NAME_PATTERN,
    Condition,
    ObjectMeta,
    Part,
    Resource,
)
from treeline_operator.api.rules import Rule
from treeline_operator.api.source import Cache, ModelSource, Source
from treeline_operator.names import MAX_NAME

__all__ = [
    "KIND",
    "SETTINGS",
    "Accelerator",
    "Adapter",
    "Autoscaling",
    "Cache",
    "DownloadStatus",
    "Drain",
    "EndpointPicker",
    "EndpointStatus",
    "Engine",
    "EngineType",
    "Gateway",
    "GatewayStatus",
    "InferencePool",
    "ModelSource",
    "ParentRef",
    "PickerParameters",
    "PoolSpec",
    "PoolStatus",
    "Role",
    "Rollout",
    "Source",
    "Standalone",
]

KIND: Final = "InferencePool"

_NAMED: Final[dict[str, Any]] = {
    "type": "array",
    "maxItems": 64,
    **LIST_MAP,
    "items": {
        "type": "object",
        "required": ["name"],
        "properties": {
            "name": {"type": "string", "description": "Its name, by which it is merged.", "maxLength": 63}
        },
        **FOREIGN,
    },
}
_STRINGS: Final = {"type": "object", "maxProperties": 64, "additionalProperties": {"type": "string"}}
_TEMPLATE: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "metadata": {
            "type": "object",
            "description": "Labels and annotations of the pods.",
            "properties": {
                "labels": {**_STRINGS, "description": "Labels; those of treeline.dev are the operator's."},
                "annotations": {**_STRINGS, "description": "Annotations."},
            },
        },
        "spec": {
            "type": "object",
            "description": "Fragment of a PodSpec.",
            "properties": {
                "containers": {
                    **_NAMED,
                    "description": "Containers; `runtime` is the engine's, others are added.",
                },
                "initContainers": {**_NAMED, "description": "Containers that run first."},
                "volumes": {**_NAMED, "description": "Volumes."},
            },
            **FOREIGN,
        },
    },
}


_OTHER_SPLITS: Final = ("--enable-dp-attention", "--data-parallel-size-local")
"""Flags under which copies share devices, or lie elsewhere."""


class PoolSpec(Part):
    """What the pool is to be."""

    RULES = (
        Rule(
            "self.engine.type == 'treeline' || !self.model.uri.startsWith('builtin://')",
            "builtin:// models are in the image of engine treeline: use hf://, pvc:// or path://",
            lambda s: s.engine.type == "treeline" or not s.model.uri.startswith("builtin://"),
            field=".model.uri",
        ),
        Rule(
            "self.engine.type in ['sglang', 'vllm'] || !has(self.model.tokenizer)",
            "the engine takes the tokenizer from the folder of the weights: remove model.tokenizer and put it there",
            lambda s: s.engine.type in ("sglang", "vllm") or s.model.tokenizer is None,
            field=".model.tokenizer",
            reason="FieldValueForbidden",
        ),
        Rule(
            "!has(self.model.cache) || self.model.uri.startsWith('hf://')"
            " || (has(self.model.tokenizer) && self.model.tokenizer.startsWith('hf://'))"
            " || (has(self.engine.adapters) && self.engine.adapters.exists(a, a.uri.startsWith('hf://')))",
            "nothing is downloaded, so there is nothing to cache: remove model.cache, or use an hf:// uri",
            lambda s: s.model.cache is None or s.downloads,
            field=".model.cache",
            reason="FieldValueForbidden",
        ),
        Rule(
            "!has(self.model.name) || !has(self.engine.adapters)"
            " || self.engine.adapters.all(a, a.name != self.model.name)",
            "an adapter has the name of the model: give it another name",
            lambda s: all(adapter.name != s.model.name for adapter in s.engine.adapters),
            field=".engine.adapters",
        ),
        Rule(
            "self.accelerator.type != 'nvidia' || self.engine.type != 'treeline' || self.accelerator.count == 1",
            "engine treeline computes on one device: set accelerator.count to 1 and raise replicas",
            lambda s: not s.accelerator.is_gpu or s.engine.type != "treeline" or s.accelerator.count == 1,
            field=".accelerator.count",
        ),
        Rule(
            "self.accelerator.type != 'nvidia' || self.accelerator.count % self.engine.tensorParallel == 0",
            "layers are split over tensorParallel devices: set accelerator.count to a multiple of it",
            lambda s: not s.accelerator.is_gpu or s.accelerator.count % s.engine.tensor_parallel == 0,
            field=".accelerator.count",
        ),
        Rule(
            "self.accelerator.type != 'nvidia'"
            " || self.accelerator.count >= self.engine.tensorParallel * self.engine.dataParallel"
            f" || (has(self.engine.args) && self.engine.args.exists(a, a in {list(_OTHER_SPLITS)}))",
            "every copy of the model needs its devices: set accelerator.count to tensorParallel times dataParallel",
            lambda s: s.has_devices,
            field=".accelerator.count",
        ),
        Rule(
            "!has(self.template) || !has(self.template.metadata) || !has(self.template.metadata.labels)"
            " || self.template.metadata.labels.all(k, !k.startsWith('treeline.dev/'))",
            "labels of treeline.dev on pods are the operator's: remove them from template.metadata.labels",
            lambda s: not any(label.startswith("treeline.dev/") for label in s.template_labels),
            field=".template.metadata.labels",
            reason="FieldValueForbidden",
        ),
    )

    model: ModelSource
    """The model that the pool serves."""
    replicas: Annotated[StrictInt, Field(ge=0, le=1000)] = 1
    """Pods. Also set through the scale subresource, by `kubectl scale` and autoscalers."""
    template: Annotated[dict[str, Any], WithJsonSchema(_TEMPLATE)] | None = None
    """Fragment of a PodTemplate, merged into the pods: containers by name, the engine's is `runtime`."""
    accelerator: Accelerator = Field(default_factory=Accelerator)
    """What a pod computes on."""
    engine: Engine = Field(default_factory=Engine)
    """The server in the pods."""
    endpoint_picker: EndpointPicker = Field(default_factory=EndpointPicker)
    """The picker of the gateway."""
    gateway: Gateway = Field(default_factory=Gateway)
    """How clients reach the pool."""
    autoscaling: Autoscaling = Field(default_factory=Autoscaling)
    """Who owns the replicas."""
    drain: Drain = Field(default_factory=Drain)
    """How a pod ends."""
    rollout: Rollout = Field(default_factory=Rollout)
    """How a change reaches the pods."""
    roles: Annotated[tuple[Role, ...], Field(max_length=3, json_schema_extra=LIST_MAP)] = ()
    """Roles of the pods; absent means that every pod does both."""

    @property
    def downloads(self) -> bool:
        """Whether anything comes from Hugging Face."""
        return self.model.downloads or any(a.uri.startswith("hf://") for a in self.engine.adapters)

    @property
    def has_devices(self) -> bool:
        """Whether a pod has a device for every part of every copy of the model."""
        engine, accelerator = self.engine, self.accelerator
        enough = accelerator.count >= engine.tensor_parallel * engine.data_parallel
        return not accelerator.is_gpu or enough or not set(_OTHER_SPLITS).isdisjoint(engine.args)

    @property
    def template_labels(self) -> dict[str, str]:
        """The labels that the user's fragment gives the pods."""
        metadata = (self.template or {}).get("metadata")
        found = metadata.get("labels") if isinstance(metadata, dict) else None
        return found if isinstance(found, dict) else {}


@DOCUMENTED
class EndpointStatus(TypedDict):
    """A pod as the picker sees it."""

    name: Annotated[str, StringConstraints(max_length=253)]
    """Name of the pod."""
    address: Annotated[str, StringConstraints(max_length=256)]
    """Address and port."""
    ready: bool
    """Whether the pod is ready."""
    serving: bool
    """Whether the picker sends requests to it."""


@DOCUMENTED
class GatewayStatus(TypedDict, total=False):
    """The gateway that the pool shares."""

    name: str
    """Name of the gateway."""
    epp: str
    """Name of the picker's Deployment."""
    owner: str
    """The pool whose settings hold."""


@DOCUMENTED
class DownloadStatus(TypedDict, total=False):
    """How far the download of the weights is."""

    percent: int
    """Part of the bytes that is there."""
    bytesDone: int
    """Bytes that are there."""
    bytesTotal: int
    """Bytes of the whole."""


@DOCUMENTED
class PoolStatus(TypedDict, total=False):
    """What the pool is."""

    observedGeneration: int
    """The generation of the spec that the status is about."""
    conditions: Annotated[list[Condition], Field(max_length=16, json_schema_extra=BY_TYPE)]
    """What holds of the pool."""
    replicas: int
    """Pods that are there."""
    readyReplicas: int
    """Pods that are ready."""
    selector: str
    """Label selector of the pods, for autoscalers."""
    url: str
    """Where clients reach the pool."""
    modelName: str
    """Name under which clients ask for the model."""
    revision: str
    """The revision that the spec asks for."""
    templateVersion: int
    """Version of the pod template that the revision was made with."""
    endpoints: Annotated[list[EndpointStatus], Field(max_length=50, json_schema_extra=LIST_MAP)]
    """The pods as the picker sees them, 50 at most."""
    gateway: GatewayStatus
    """The gateway that the pool shares."""
    download: DownloadStatus
    """How far the download of the weights is; absent when nothing is downloaded."""


_RESERVED: Final = ("-gateway", "-epp", "-edge", "-kv-keys", "-gie", "-pods")


class InferencePool(Resource):
    """A model served by a set of equal pods behind one URL."""

    RULES = (
        Rule(
            f"self.metadata.name.size() <= {MAX_NAME}",
            f"longer names are made from the pool's, and 63 characters is their limit: use {MAX_NAME} or fewer",
            lambda p: len(p.name) <= MAX_NAME,
            field=".metadata.name",
        ),
        Rule(
            f"self.metadata.name.matches('{SHORT_NAME_PATTERN}')",
            "names of Services are made from the pool's: use small letters, digits and '-', a letter first",
            lambda p: re.match(SHORT_NAME_PATTERN, p.name) is not None,
            field=".metadata.name",
        ),
        Rule(
            f"!self.metadata.name.matches('({'|'.join(_RESERVED)})$')",
            f"objects of gateways and pools end in {', '.join(_RESERVED)}: choose a name without such an end",
            lambda p: not p.name.endswith(_RESERVED),
            field=".metadata.name",
        ),
    )

    kind: Literal["InferencePool"] = "InferencePool"
    metadata: ObjectMeta
    spec: PoolSpec
    """What the pool is to be."""
    status: PoolStatus = Field(default_factory=PoolStatus)
    """What the pool is, written by the operator."""
