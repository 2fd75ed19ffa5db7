"""Rules across fields in CEL, for the API server and for files, each with the fix in words."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from treeline_operator.quantity import quantity

if TYPE_CHECKING:
    from cel_expr_python import cel as evaluator

KEYWORD = "x-kubernetes-validations"
RefusalReason = Literal["FieldValueInvalid", "FieldValueForbidden", "FieldValueRequired", "FieldValueDuplicate"]


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition on a value, `self` in CEL. `field` is the path from the value to the wrong field."""

    cel: str
    message: str
    field: str = ""
    reason: RefusalReason = "FieldValueInvalid"

    def as_validation(self) -> dict[str, str]:
        """The rule as an item of `x-kubernetes-validations`."""
        validation = {"rule": self.cel, "message": self.message, "reason": self.reason}
        return validation | {"fieldPath": self.field} if self.field else validation


def forbidden(cel: str, message: str, field: str = "") -> Rule:
    """A rule of a field that must not be set."""
    return Rule(cel, message, field, "FieldValueForbidden")


class Ruled(BaseModel):
    """A model with rules, which stand in its schema too."""

    RULES: ClassVar[tuple[Rule, ...]] = ()

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core)
        if cls.RULES:
            handler.resolve_ref_schema(schema)[KEYWORD] = [rule.as_validation() for rule in cls.RULES]
        return schema


def violations(value: Ruled) -> Iterator[str]:
    """Every rule that a parsed object breaks, each as `path: message`, as the API server would refuse it."""
    yield from _violations(value, _pruned(value.model_dump(mode="json", by_alias=True)), "")


def _pruned(value: Any) -> Any:
    """Without nulls, which the API server drops before it looks."""
    if isinstance(value, dict):
        return {name: _pruned(inner) for name, inner in value.items() if inner is not None}
    return [_pruned(inner) for inner in value] if isinstance(value, list) else value


def _violations(value: Ruled, plain: dict[str, Any], path: str) -> Iterator[str]:
    for rule in value.RULES:
        if not _holds(rule.cel, plain):
            yield f"{(path + rule.field).lstrip('.') or 'object'}: {rule.message}"
    for name, field in type(value).model_fields.items():
        alias, inner = field.alias or name, getattr(value, name)
        if isinstance(inner, Ruled):
            yield from _violations(inner, plain[alias], f"{path}.{alias}")
        elif isinstance(inner, tuple):
            for index, item in enumerate(inner):
                if isinstance(item, Ruled):
                    yield from _violations(item, plain[alias][index], f"{path}.{alias}[{index}]")


def _holds(rule: str, value: Any) -> bool:
    """Whether a rule of `self` holds. A rule that cannot be evaluated fails, as at the API server."""
    return _compiled(rule).eval(data={"self": value}).value() is True


@functools.cache
def _compiled(rule: str) -> evaluator.Expression:
    return _environment().compile(rule)


@functools.cache
def _environment() -> evaluator.Env:
    """Return CEL's own functions and Kubernetes' quantity functions, which our rules use. The evaluator is imported
    here because the running operator never needs it.
    """
    from cel_expr_python import cel

    string, number = cel.Type.STRING, cel.Type.INT
    of_text = cel.Overload("string_to_quantity", string, [string], False, lambda text: text)
    compare = cel.Overload("quantity_compare", number, [string, string], True, _compare)
    functions = [cel.FunctionDecl("quantity", [of_text]), cel.FunctionDecl("compareTo", [compare])]
    return cel.NewEnv(variables={"self": cel.Type.DYN}, functions=functions)


def _compare(one: str, other: str) -> int:
    left, right = quantity(one) or 0, quantity(other) or 0
    return (left > right) - (left < right)
