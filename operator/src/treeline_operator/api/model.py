"""Owns the InferenceModel: a name that clients may ask for, and what serves it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints
from typing_extensions import TypedDict

from treeline_operator.api.parts import Condition, NamedRef, ObjectMeta, Part, Resource

ModelName = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^\S+$")]


class TargetModel(Part):
    """A model of the pool that answers for the name."""

    name: ModelName
    """Name of a model or adapter that the pool serves."""
    weight: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Share of the requests, relative to the other targets' weights. On all targets or on none."""


class ModelSpec(Part):
    """What the model is to be."""

    model_name: ModelName
    """Name that clients ask for in `model`. Unique in the namespace's gateway; of two the oldest holds it."""
    pool_ref: NamedRef
    """The InferencePool that serves it."""
    criticality: Literal["Critical", "Standard", "Sheddable"] = "Standard"
    """A Sheddable request is refused with 429 when every endpoint that it may use is saturated."""
    target_models: Annotated[tuple[TargetModel, ...], Field(max_length=10)] = ()
    """What answers; absent means the pool's model of the same name."""
    fallback_pools: Annotated[tuple[NamedRef, ...], Field(max_length=5)] = ()
    """Pools that serve the name, in this order, when the pool has no usable endpoint."""


class ModelStatus(TypedDict, total=False):
    """What the model is."""

    observedGeneration: int
    conditions: list[Condition]
    conflictingModel: str


class InferenceModel(Resource):
    """A name that clients may ask for, served by a pool."""

    kind: Literal["InferenceModel"] = "InferenceModel"
    metadata: ObjectMeta
    spec: ModelSpec
    status: ModelStatus = Field(default_factory=ModelStatus)
