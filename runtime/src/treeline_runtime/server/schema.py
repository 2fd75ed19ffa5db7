"""How `/openapi.json` is made: bodies from the structs that the readers read, answers from `answers`. What it says of
each path stands at its route.

A body's schema is what `fields.Body.read` accepts: each field that is acted on with its type and bounds, those that are
harmless with the reason why, those that may have neutral values alone with these values, and any other field with a
value that asks for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from fastapi import FastAPI

from treeline_runtime.server.answers import Error
from treeline_runtime.server.fields import NEUTRAL, ON_BY_DEFAULT, Body

Schema = dict[str, Any]

JSON, EVENTS = "application/json", "text/event-stream"
OPENAI, ANTHROPIC, NATIVE = "OpenAI's API", "Anthropic's API", "SGLang's API"
STATE, VECTORS = "Probes and information", "Rerankers, rewards and other vectors"
"""Tags."""
REFERENCE = "#/components/schemas/{name}"
NOTHING: tuple[Any, ...] = (None, False, [], {})
"""With these values any field asks for nothing (`fields.is_neutral`)."""
DESCRIPTION = """\
An OpenAI-compatible API, Anthropic's `/v1/messages` and SGLang's `/generate`, over a radix prefix cache. Nothing in a
body is ignored: what the server does not act on is harmless, or has a value that asks for nothing, or is a 400 that
names the field.
"""


_KINDS: list[Any] = [Error]
"""What operations refer to."""


def operation(
    *, tag: str, summary: str, answer: Any = dict, event: Any = None, error: Any = Error, body: type[Body] | None = None
) -> dict[str, Any]:
    """What a route says of itself, as keywords of its decorator. `answer`, `event` and `error`: the types of answers,
    of a stream's events (None: there are no streams), and of answers that are errors."""
    _KINDS.extend(kind for kind in (answer, event, error, body) if kind is not None)
    content = {JSON: {"schema": reference(answer)}}
    if event is not None:
        content[EVENTS] = {"schema": reference(event)}
    failed = {"description": "An error", "content": {JSON: {"schema": reference(error)}}}
    extra: Schema = {}
    if body is not None:
        _KINDS.extend(body.parts)
        extra["requestBody"] = {"required": True, "content": {JSON: {"schema": reference(body)}}}
    return {
        "tags": [tag],
        "summary": summary,
        "responses": {200: {"description": "The answer", "content": content}, "default": failed},
        "openapi_extra": extra,
    }


def document(app: FastAPI) -> Schema:
    """The OpenAPI document of an application: FastAPI's, and the schemas of bodies and answers."""
    made = app.openapi()
    _, schemas = msgspec.json.schema_components(_KINDS, ref_template=REFERENCE)
    for body in _bodies(Body):
        if (acted_on := schemas.get(body.__name__)) is not None:
            schemas[body.__name__] = _taken(body, acted_on)
    made.setdefault("components", {})["schemas"] = schemas
    return made


def _bodies(kind: type[Body]) -> Iterator[type[Body]]:
    for one in kind.__subclasses__():
        yield one
        yield from _bodies(one)


def _taken(body: type[Body], acted_on: Schema) -> Schema:
    """What `Body.read` takes. `acted_on`: the schema of the struct."""
    harmless = {name: {"description": f"Changes nothing: {why}."} for name, why in body.harmless.items()}
    neutral = {name: {"enum": [*NOTHING, *values]} for name, values in NEUTRAL.items()}
    on = {name: {"enum": [value for value in NOTHING if value is not False]} for name in ON_BY_DEFAULT}
    own = acted_on["properties"] | body.shown
    return acted_on | {
        "properties": own | neutral | on | harmless | own,  # these first, and as they are
        "additionalProperties": {"enum": list(NOTHING)},
    }


def reference(kind: Any) -> Schema:
    """A type's schema, in which structs are named."""
    (found,), _ = msgspec.json.schema_components([kind], ref_template=REFERENCE)
    return found
