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
    """Share of the requests, relative to the other targets' weights. On all targets or on none."""


class ModelSpec(Part):
    """What the model is to be."""

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
    """Name that clients ask for in `model`. Unique in the namespace's gateway; of two the oldest holds it."""
    pool_ref: NamedRef
    """The InferencePool that serves it."""
    criticality: Literal["Critical", "Standard", "Sheddable"] = "Standard"
    """A Sheddable request is answered 429 when every endpoint that it may use has a queue of more than the picker's
    maxTtftSeconds. Critical and Standard requests wait."""
    target_models: Annotated[tuple[TargetModel, ...], Field(max_length=10, json_schema_extra=LIST_MAP)] = ()
    """Names that the pool's engines are asked for; of several one is drawn for each request, by weight. A name that
    they do not serve and another pool of the same gateway does goes there: so a share of requests tries another base
    model. Absent means modelName itself, or the only model of a pool that serves one under another name."""
    fallback_pools: Annotated[tuple[NamedRef, ...], Field(max_length=5, json_schema_extra=LIST_MAP)] = ()
    """Pools that serve the name, in this order, when the pool has no usable endpoint."""


@DOCUMENTED
class ModelStatus(TypedDict, total=False):
    """What the model is."""

    observedGeneration: int
    """The generation of the spec that the status is about."""
    conditions: Annotated[list[Condition], Field(max_length=16, json_schema_extra=BY_TYPE)]
    """What holds of the model."""
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
    """What the model is to be."""
    status: ModelStatus = Field(default_factory=ModelStatus)
    """What the model is, written by the operator."""
