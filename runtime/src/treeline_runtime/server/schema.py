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
from fastapi.openapi.utils import get_openapi

from treeline_runtime.server.answers import Error
from treeline_runtime.server.fields import HARMLESS, NEUTRAL, ON_BY_DEFAULT

Schema = dict[str, Any]

JSON, EVENTS = "application/json", "text/event-stream"
REFERENCE = "#/components/schemas/{name}"
KEY = "key"
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


@dataclass(frozen=True, kw_only=True)
class Operation:
    """What can be asked of a path."""

    tag: str
    summary: str
    answer: Any = dict
    """Its type."""
    event: Any = None
    """The type of a stream's events; None: there are no streams."""
    error: Any = Error
    """The type of answers that are errors."""
    body: Body | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Of the path: what they mean, by name."""

    def written(self, *, open: bool) -> Schema:
        """As OpenAPI has it. `open`: needs no key."""
        content = {JSON: {"schema": reference(self.answer)}}
        if self.event is not None:
            content[EVENTS] = {"schema": reference(self.event)}
        failed = {"description": "An error", "content": {JSON: {"schema": reference(self.error)}}}
        made: Schema = {
            "tags": [self.tag],
            "summary": self.summary,
            "responses": {"200": {"description": "The answer", "content": content}, "default": failed},
            "security": [] if open else [{KEY: []}, {}],
        }
        if self.body is not None:
            made["requestBody"] = {"required": True, "content": {JSON: {"schema": self.body.reference}}}
        if self.parameters:
            made["parameters"] = [
                {
                    "in": "path",
                    "name": name,
                    "required": True,
                    "schema": {"type": "string"},
                    "description": what,
                }
                for name, what in self.parameters.items()
            ]
        return made


def document(app: FastAPI, operations: Iterable[Operation]) -> Schema:
    """The OpenAPI document of an application whose routes have these operations."""
    types: list[Any] = [Error]
    bodies = dict[str, Schema]()
    for operation in operations:
        types += [kind for kind in (operation.answer, operation.event, operation.error) if kind is not None]
        bodies |= {} if operation.body is None else operation.body.components()
    made = get_openapi(title=app.title, version=app.version, description=DESCRIPTION, routes=app.routes)
    key = {
        "type": "http",
        "scheme": "bearer",
        "description": "Where the server was started with --api-key. `x-api-key` takes it as well.",
    }
    made["components"] = {"schemas": components(types) | bodies, "securitySchemes": {KEY: key}}
    return made


def reference(kind: Any) -> Schema:
    """A type's schema, in which structs are named."""
    (found,), _ = msgspec.json.schema_components([kind], ref_template=REFERENCE)
    return found


def components(kinds: Iterable[Any]) -> dict[str, Schema]:
    """The schemas of the structs in types, by name."""
    return msgspec.json.schema_components(kinds, ref_template=REFERENCE)[1]
