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
"""Fields that a preset may not set: they identify, address and scale the pool."""
_KINDS: Final = ("engine.type", "accelerator.type")
"""Fields that determine the meaning of their neighbours: presets of another value do not apply."""


class PresetProblem(ValueError):
    """A pool and its preset do not fit; the text says why, `reason` in one word."""

    def __init__(self, reason: Reason, problem: str) -> None:
        super().__init__(problem)
        self.reason = reason


def resolved(pool: InferencePool, presets: Mapping[str, Object]) -> InferencePool:
    """The pool merged with its preset; the pool's own fields win. Raises PresetProblem.

    A field at its default does not count as the pool's own, because the API server stores defaults.
    """
    name = pool.spec.preset
    if name is None:
        return pool
    if name not in presets:
        there = ", ".join(sorted(presets)) or "none"
        raise PresetProblem(Reason.PRESET_MISSING, f"unknown preset {name}; the operator has: {there}")
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
        return f"{own} is not allowed in a preset"
    for field in _KINDS:
        theirs, ours = _at(preset, field), _at(said, field)
        if None not in (theirs, ours) and theirs != ours:
            return f"its {field} is {theirs}, the pool's is {ours}"
    return ""


def _at(spec: object, field: str) -> object:
    for part in field.split("."):
        spec = spec.get(part) if isinstance(spec, dict) else None
    return spec
