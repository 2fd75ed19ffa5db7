"""What does not fit a typed kind, in words for whoever wrote it: field by field, with what a misspelt name may mean."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError


def explain(exc: ValidationError, kind: type[BaseModel]) -> str:
    """What is wrong with an object of `kind`, field by field, in one line."""
    errors = exc.errors(include_url=False)
    return "; ".join(f"{'.'.join(str(part) for part in e['loc'])}: {misfit(e, kind)}" for e in errors)


def misfit(error: Any, kind: type[BaseModel]) -> str:
    """What is wrong with one field, an item of `ValidationError.errors()`."""
    if error["type"] != "extra_forbidden":
        return str(error["msg"])
    *before, name = error["loc"]
    near = difflib.get_close_matches(str(name), _names(kind, before), n=1)
    return f"there is no such field; did you mean {near[0]}?" if near else "there is no such field"


def _names(kind: Any, path: Sequence[int | str]) -> list[str]:
    """The names of the fields at a path."""
    for part in path:
        if isinstance(part, str):
            kind = next((field.annotation for name, field in _fields(kind) if name == part), None)
    return [name for name, _ in _fields(kind)]


def _fields(annotation: Any) -> Iterator[tuple[str, Any]]:
    """Names and fields of the models that an annotation is made of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from ((field.serialization_alias or name, field) for name, field in annotation.model_fields.items())
    else:
        for inner in get_args(annotation):
            yield from _fields(inner)
