"""How `/openapi.json` is made: bodies from the structs that the readers convert to, answers from `answers`. What it
says of each path is in `operations`.

A body's schema is what `fields.check_unknown` and `fields.convert` accept: each field that is acted on with its type
and bounds, those that are harmless with the reason why, those that may have neutral values alone with these values,
and any other field with a value that asks for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import FastAPI

from treeline_runtime.server.answers import Error
from treeline_runtime.server.fields import HARMLESS, NEUTRAL, ON_BY_DEFAULT

Schema = dict[str, Any]

JSON, EVENTS = "application/json", "text/event-stream"
REFERENCE = "#/components/schemas/{name}"
NOTHING: tuple[Any, ...] = (None, False, [], {})
"""With these values any field asks for nothing (`fields.is_neutral`)."""
DESCRIPTION = """\
An OpenAI-compatible API, Anthropic's `/v1/messages` and SGLang's `/generate`, over a radix prefix cache. Nothing in a
body is ignored: what the server does not act on is harmless, or has a value that asks for nothing, or is a 400 that
names the field.
"""


@dataclass(frozen=True, kw_only=True)
class Body:
    """What a request, or an object within one, may have."""

    struct: type[msgspec.Struct]
    description: str
    others: Mapping[str, Schema] = field(default_factory=dict)
    """Fields that somebody else reads, or of which the struct says too little."""
    required: tuple[str, ...] = ()
    harmless: Mapping[str, str] = field(default_factory=lambda: HARMLESS)
    parts: tuple[Body, ...] = ()
    """Objects within it."""

    @property
    def reference(self) -> Schema:
        return reference(self.struct)

    def components(self) -> dict[str, Schema]:
        """Its schema and those of its parts, by name."""
        made = components([self.struct])[self.struct.__name__]
        harmless = {name: {"description": f"Changes nothing: {why}."} for name, why in self.harmless.items()}
        neutral = {name: {"enum": [*NOTHING, *values]} for name, values in NEUTRAL.items()}
        on = {name: {"enum": [value for value in NOTHING if value is not False]} for name in ON_BY_DEFAULT}
        acted_on = made["properties"] | self.others
        own = made | {
            "description": self.description,
            "properties": acted_on | neutral | on | harmless | acted_on,  # these first, and as they are
            "required": sorted({*made["required"], *self.required}),
            "additionalProperties": {"enum": list(NOTHING)},
        }
        found = {self.struct.__name__: own}
        for part in self.parts:
            found |= part.components()
        return found


_KINDS: list[Any] = [Error]
_BODIES: list[Body] = []
"""What operations refer to."""


def operation(
    *, tag: str, summary: str, answer: Any = dict, event: Any = None, error: Any = Error, body: Body | None = None
) -> dict[str, Any]:
    """What a route says of itself, as keywords of its decorator. `answer`, `event` and `error`: the types of answers,
    of a stream's events (None: there are no streams), and of answers that are errors."""
    _KINDS.extend(kind for kind in (answer, event, error) if kind is not None)
    content = {JSON: {"schema": reference(answer)}}
    if event is not None:
        content[EVENTS] = {"schema": reference(event)}
    failed = {"description": "An error", "content": {JSON: {"schema": reference(error)}}}
    extra: Schema = {}
    if body is not None:
        _BODIES.append(body)
        extra["requestBody"] = {"required": True, "content": {JSON: {"schema": body.reference}}}
    return {
        "tags": [tag],
        "summary": summary,
        "responses": {200: {"description": "The answer", "content": content}, "default": failed},
        "openapi_extra": extra,
    }


def document(app: FastAPI) -> Schema:
    """The OpenAPI document of an application: FastAPI's, and the schemas of bodies and answers."""
    made = app.openapi()
    schemas = components(_KINDS)
    for body in _BODIES:
        schemas |= body.components()
    made.setdefault("components", {})["schemas"] = schemas
    return made


def reference(kind: Any) -> Schema:
    """A type's schema, in which structs are named."""
    (found,), _ = msgspec.json.schema_components([kind], ref_template=REFERENCE)
    return found


def components(kinds: Iterable[Any]) -> dict[str, Schema]:
    """The schemas of the structs in types, by name."""
    return msgspec.json.schema_components(kinds, ref_template=REFERENCE)[1]
