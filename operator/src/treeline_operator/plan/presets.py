"""Presets: parts of a pool's spec to which the owner of the cluster gave names. A pool lays its own fields over one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pydantic import ValidationError

from treeline_operator.api.conditions import Reason
from treeline_operator.api.parts import explain
from treeline_operator.api.pool import InferencePool, PoolSpec
from treeline_operator.api.rules import violations
from treeline_operator.plan.merge import TemplateInvalid, merged
from treeline_operator.plan.objects import Object

OWN: Final = ("replicas", "preset", "model.uri", "model.name", "gateway.name")
"""Fields that every pool says itself: by them it is found, scaled and identified, whatever its preset is."""
_KINDS: Final = ("engine.type", "accelerator.type")
"""Fields whose value says what their neighbours mean: nothing is laid over those of another kind."""


class PresetProblem(ValueError):
    """A pool cannot be had over the preset that it names; the text says why, `reason` in one word."""

    def __init__(self, reason: Reason, problem: str) -> None:
        super().__init__(problem)
        self.reason = reason


def resolved(pool: InferencePool, presets: Mapping[str, Object]) -> InferencePool:
    """The pool with the preset that it names below its own fields. Raises PresetProblem.

    A field that has its default is not the pool's own: the API server writes the defaults into what it stores.
    """
    name = pool.spec.preset
    if name is None:
        return pool
    if name not in presets:
        there = ", ".join(sorted(presets)) or "none"
        raise PresetProblem(Reason.PRESET_MISSING, f"there is no preset {name}; the operator has: {there}")
    preset, said = presets[name], pool.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    try:
        if problem := _contradiction(preset, said):
            raise TemplateInvalid(problem)
        spec = PoolSpec.model_validate(merged(preset, said, keep_unset=True), extra="forbid")
    except (ValidationError, TemplateInvalid) as exc:
        what = explain(exc, PoolSpec) if isinstance(exc, ValidationError) else str(exc)
        raise PresetProblem(Reason.PRESET_CONFLICT, f"preset {name}: {what}") from exc
    whole = pool.model_copy(update={"spec": spec})
    if broken := "; ".join(violations(whole)):
        raise PresetProblem(Reason.PRESET_CONFLICT, f"with preset {name}: {broken}")
    return whole


def _contradiction(preset: Object, said: Object) -> str:
    if own := next((field for field in OWN if _at(preset, field) is not None), ""):
        return f"{own} is a field that every pool has for itself"
    for field in _KINDS:
        theirs, ours = _at(preset, field), _at(said, field)
        if None not in (theirs, ours) and theirs != ours:
            return f"its {field} is {theirs}, the pool's is {ours}"
    return ""


def _at(spec: object, field: str) -> object:
    for part in field.split("."):
        spec = spec.get(part) if isinstance(spec, dict) else None
    return spec
