"""Owns rules across fields: each in CEL for the API server, as a function for files, and with the fix in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

KEYWORD = "x-kubernetes-validations"
RefusalReason = Literal[
    "FieldValueInvalid", "FieldValueForbidden", "FieldValueRequired", "FieldValueDuplicate"
]


@dataclass(frozen=True, slots=True)
class Rule:
    """What must hold of a value. ``cel`` and ``holds`` say the same, the one of ``self``, the other of our model of it.

    ``field`` is the path, from the value, of the field that is to blame: ``.image``.
    """

    cel: str
    message: str
    holds: Callable[[Any], bool]
    field: str = ""
    reason: RefusalReason = "FieldValueInvalid"

    def as_validation(self) -> dict[str, str]:
        """The rule as an item of ``x-kubernetes-validations``."""
        validation = {"rule": self.cel, "message": self.message, "reason": self.reason}
        return validation | {"fieldPath": self.field} if self.field else validation


class Ruled(BaseModel):
    """A model with rules, which stand in its schema too."""

    RULES: ClassVar[tuple[Rule, ...]] = ()

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core)
        if cls.RULES:
            handler.resolve_ref_schema(schema)[KEYWORD] = [rule.as_validation() for rule in cls.RULES]
        return schema


def violations(value: Any, path: str = "") -> Iterator[str]:
    """Every rule that a parsed object breaks, each as ``path: message``, as the API server would refuse it."""
    if isinstance(value, Ruled):
        for rule in value.RULES:
            if not rule.holds(value):
                yield f"{(path + rule.field).lstrip('.') or 'object'}: {rule.message}"
        for name, field in type(value).model_fields.items():
            yield from violations(getattr(value, name), f"{path}.{field.alias or name}")
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from violations(item, f"{path}[{index}]")
