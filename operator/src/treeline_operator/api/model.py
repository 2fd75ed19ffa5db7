"""Owns the InferenceModel: a name that clients may ask for, and what serves it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictInt, StringConstraints
from typing_extensions import TypedDict

from treeline_operator.api.parts import (
    BY_TYPE,
    DOCUMENTED,
    LIST_MAP,
    Condition,
    NamedRef,
    ObjectMeta,
    Part,
    Resource,
    ServedName,
)
from treeline_operator.api.rules import Rule, forbidden
from treeline_operator.api.source import Uri
from treeline_operator.names import MAX_NAME


class TargetModel(Part):
    """A model of the pool that answers for the name."""

    name: ServedName
    """Name of a model or adapter that the pool serves."""
    weight: Annotated[StrictInt, Field(ge=1, le=1_000_000)] | None = None
    """Share of requests; on all targets or none."""


class ModelAdapter(Part):
    """A LoRA adapter that pods load without a restart."""

    RULES = (
        Rule(
            "self.uri.matches('^(hf|s3|gs|pvc)://')",
            "running pods get an adapter from hf://, s3://, gs:// or pvc://: write one of them",
            field=".uri",
        ),
    )

    uri: Uri
    """Where its files are, as in `model.uri` of a pool: `hf://`, `s3://`, `gs://`, or `pvc://` with a claim of the
    pool's `engine.lora`."""
    digest: Annotated[str, StringConstraints(pattern="^[0-9a-f]{16,64}$")] | None = None
    """Digest of its files, or 16 digits or more of it, as in `status.adapter`; other files are not served. Files that
    changed at the same uri are loaded when it changes."""
    replicas: Annotated[StrictInt, Field(ge=1)] | None = None
    """Pods that have it; default all."""


class ModelSpec(Part):
    """The desired model."""

    RULES = (
        forbidden(
            "!has(self.adapter) || !has(self.targetModels) || self.targetModels.size() == 0",
            "the adapter answers for the name: remove targetModels, or let those of another InferenceModel name it",
            field=".targetModels",
        ),
        forbidden(
            "!has(self.adapter) || !has(self.fallbackPools) || self.fallbackPools.size() == 0",
            "other pools would answer without the adapter: remove fallbackPools",
            field=".fallbackPools",
        ),
        Rule(
            "!has(self.targetModels) || self.targetModels.all(t, has(t.weight))"
            " || self.targetModels.all(t, !has(t.weight))",
            "some targets have a weight and some have none: give every target a weight, or none",
            field=".targetModels",
        ),
        Rule(
            "!has(self.fallbackPools) || self.fallbackPools.all(p, p.name != self.poolRef.name)",
            "the pool is its own fallback: remove it from fallbackPools",
            field=".fallbackPools",
        ),
    )

    model_name: ServedName
    """Name that clients ask for. In a gateway the oldest object holds it."""
    pool_ref: NamedRef
    """The InferencePool that serves it."""
    criticality: Literal["Critical", "Standard", "Sheddable"] = "Standard"
    """Sheddable requests get 429 when every usable endpoint's queue is longer than maxTtftSeconds. Others wait."""
    target_models: Annotated[tuple[TargetModel, ...], Field(max_length=10, json_schema_extra=LIST_MAP)] = ()
    """Models that answer, drawn by weight, of this or another pool of the gateway. Default: modelName, or the pool's
    only model."""
    fallback_pools: Annotated[tuple[NamedRef, ...], Field(max_length=5, json_schema_extra=LIST_MAP)] = ()
    """Pools to use, in order, while the pool has no usable endpoint."""
    adapter: ModelAdapter | None = None
    """The adapter that answers for the name. The pool needs `engine.lora`."""


@DOCUMENTED
class AdapterStatus(TypedDict, total=False):
    """The adapter in the pods."""

    name: str
    """Its name in the engines, to which requests go. Another uri or digest has another name."""
    since: str
    """The time since which they do."""
    digest: str
    """The beginning of the digest of its files."""
    loaded: int
    """Pods that have loaded what the spec asks for."""
    wanted: int
    """Pods that should."""


@DOCUMENTED
class ModelStatus(TypedDict, total=False):
    """The state of the model."""

    observedGeneration: int
    """Generation of the spec that the status describes."""
    conditions: Annotated[list[Condition], Field(max_length=16, json_schema_extra=BY_TYPE)]
    """Conditions of the model."""
    conflictingModel: str
    """The InferenceModel or InferencePool that has the name."""
    adapter: AdapterStatus
    """The adapter, where the spec has one."""


class InferenceModel(Resource):
    """A name that clients may ask for, served by a pool."""

    RULES = (
        Rule(
            f"self.metadata.name.size() <= {MAX_NAME}",
            f"the name of the object is too long: use {MAX_NAME} characters or fewer; modelName may have 256",
            field=".metadata.name",
        ),
    )

    kind: Literal["InferenceModel"] = "InferenceModel"
    metadata: ObjectMeta
    spec: ModelSpec
    """The desired model."""
    status: ModelStatus = Field(default_factory=ModelStatus)
    """The state of the model, written by the operator."""
