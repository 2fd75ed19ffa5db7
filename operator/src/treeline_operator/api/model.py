"""Owns the InferenceModel: a name that clients may ask for, and what serves it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictInt
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
from treeline_operator.api.rules import Rule
from treeline_operator.names import MAX_NAME


class TargetModel(Part):
    """A model of the pool that answers for the name."""

    name: ServedName
    """Name of a model or adapter that the pool serves."""
    weight: Annotated[StrictInt, Field(ge=1, le=1_000_000)] | None = None
    """Relative share of requests. On all targets or on none."""


class ModelSpec(Part):
    """The desired model."""

    RULES = (
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
    """Name that clients ask for in `model`. Unique in the gateway: the oldest object holds it."""
    pool_ref: NamedRef
    """The InferencePool that serves it."""
    criticality: Literal["Critical", "Standard", "Sheddable"] = "Standard"
    """Sheddable requests get 429 when every usable endpoint has a queue longer than maxTtftSeconds. Others wait."""
    target_models: Annotated[tuple[TargetModel, ...], Field(max_length=10, json_schema_extra=LIST_MAP)] = ()
    """Models that answer; of several one is drawn per request, by weight. A request for a name that another pool of the
    gateway serves goes to that pool, for trying another base model. Absent means modelName, or the pool's only
    model."""
    fallback_pools: Annotated[tuple[NamedRef, ...], Field(max_length=5, json_schema_extra=LIST_MAP)] = ()
    """Pools to use, in this order, while the pool has no usable endpoint."""


@DOCUMENTED
class ModelStatus(TypedDict, total=False):
    """The state of the model."""

    observedGeneration: int
    """Generation of the spec that the status describes."""
    conditions: Annotated[list[Condition], Field(max_length=16, json_schema_extra=BY_TYPE)]
    """Conditions of the model."""
    conflictingModel: str
    """The InferenceModel or InferencePool that has the name."""


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
