"""Makes `/openapi.json`: bodies from the readers' structs, answers from `answers`. Paths are described at their routes.

A body's schema is what `fields.Body.read` accepts: supported fields with type and bounds, harmless ones with the
reason, others with their neutral values, and any other field with a value that asks for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, FastAPI

from treeline_runtime.server.answers import Error
from treeline_runtime.server.fields import NEUTRAL, ON_BY_DEFAULT, Body

Schema = dict[str, Any]
EndpointT = TypeVar("EndpointT", bound=Callable[..., Any])

JSON, EVENTS, LINES, FORM = "application/json", "text/event-stream", "application/x-ndjson", "multipart/form-data"
OPENAI, ANTHROPIC, OLLAMA, NATIVE = "OpenAI's API", "Anthropic's API", "Ollama's API", "SGLang's API"
STATE, VECTORS = "Probes and information", "Rerankers, rewards and other vectors"
"""Tags."""
REFERENCE = "#/components/schemas/{name}"
NOTHING: tuple[Any, ...] = (None, False, [], {})
"""Values with which any field is neutral (`fields.is_neutral`)."""
DESCRIPTION = """\
An OpenAI-compatible API, Anthropic's `/v1/messages`, Ollama's `/api/chat` and SGLang's `/generate`, over a radix
prefix cache. Nothing in a body is ignored: what the server does not act on is harmless, or has a value that asks for
nothing, or is a 400 that names the field.
"""


_KINDS: list[Any] = [Error]
"""Components that operations refer to."""


def operation(
    *,
    tag: str,
    summary: str,
    answer: Any = dict,
    event: Any = None,
    lines: Any = None,
    error: Any = Error,
    body: type[Body] | None = None,
    form: type[Body] | None = None,
) -> dict[str, Any]:
    """A route's description, as keywords of its decorator. `answer`, `event`, `lines`, `error`: the types of answers,
    of a stream's events or lines (None: no such streams) and errors."""
    _KINDS.extend(kind for kind in (answer, event, lines, error, body, form) if kind is not None)
    content = {JSON: {"schema": reference(answer)}}
    for stream, kind in ((EVENTS, event), (LINES, lines)):
        if kind is not None:
            content[stream] = {"schema": reference(kind)}
    failed = {"description": "An error", "content": {JSON: {"schema": reference(error)}}}
    extra: Schema = {}
    for sent, how in ((body, JSON), (form, FORM)):
        if sent is not None:
            _KINDS.extend(sent.parts)
            extra["requestBody"] = {"required": True, "content": {how: {"schema": reference(sent)}}}
    return {
        "tags": [tag],
        "summary": summary,
        "responses": {200: {"description": "The answer", "content": content}, "default": failed},
        "openapi_extra": extra,
    }


def post(router: APIRouter, *paths: str, **described: Any) -> Callable[[EndpointT], EndpointT]:
    """A decorator for the endpoint of these paths. `described`: as for `operation`."""
    description = operation(**described)

    def add(endpoint: EndpointT) -> EndpointT:
        for path in paths:
            router.add_api_route(path, endpoint, methods=["POST"], **description)
        return endpoint

    return add


def document(app: FastAPI) -> Schema:
    """An application's OpenAPI document: FastAPI's, with the schemas of bodies and answers."""
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
    """The schema of what `Body.read` accepts, from the struct's own schema `acted_on`."""
    harmless = {name: {"description": f"Changes nothing: {why}."} for name, why in body.harmless.items()}
    neutral = {name: {"enum": [*NOTHING, *values]} for name, values in NEUTRAL.items()}
    on = {name: {"enum": [value for value in NOTHING if value is not False]} for name in ON_BY_DEFAULT}
    own = acted_on["properties"] | body.shown
    return acted_on | {
        "properties": own | neutral | on | harmless | own,  # these first, and as they are
        "additionalProperties": {"enum": list(NOTHING)},
    }


def reference(kind: Any) -> Schema:
    """A type's schema with references to structs."""
    (found,), _ = msgspec.json.schema_components([kind], ref_template=REFERENCE)
    return found
