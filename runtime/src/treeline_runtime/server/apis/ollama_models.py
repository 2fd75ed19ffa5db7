"""Ollama's paths about models: `/api/tags`, `/api/ps`, `/api/show` and `/api/version`."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from fastapi import APIRouter, Response, Security
from treeline_wire.apis import ollama

from treeline_runtime.server import schema
from treeline_runtime.server.answers import Model
from treeline_runtime.server.apis.answers import OllamaError
from treeline_runtime.server.dependencies import Controlling, Guarded
from treeline_runtime.server.errors import UnknownModel
from treeline_runtime.server.fields import Body
from treeline_runtime.server.http import json_answer
from treeline_runtime.server.probes import Probes
from treeline_runtime.server.service import Service

VERSION: Final = "0.12.11"
"""The version of Ollama whose API this is: clients refuse servers that are too old for them."""
_NEVER: Final = "9999-12-31T23:59:59Z"
"""When a model is unloaded."""


class OllamaShowBody(Body, frozen=True):
    """The name of a model."""

    harmless: ClassVar = {"verbose": "the tokenizer is at /treeline/tokenizer", "name": "the older name of `model`"}
    model: str


def router(service: Service, probes: Probes) -> APIRouter:
    """The paths, which need the API key. Clients name a model with `:latest` or without."""
    made = APIRouter(dependencies=[Security(Guarded())])

    def listed() -> list[dict[str, Any]]:
        return ollama.listed([model.id for model in probes.served], probes.served[0].created)["models"]

    async def tags() -> Response:
        return json_answer({"models": listed()})

    async def running() -> Response:
        more = {"expires_at": _NEVER, "size_vram": 0, "context_length": probes.served[0].max_model_len or 0}
        return json_answer({"models": [model | more for model in listed()]})

    async def version() -> Response:
        return json_answer({"version": VERSION})

    async def show(asked: Controlling) -> Response:
        body = OllamaShowBody.read(asked.json_object())
        served = {model.id: model for model in probes.served}
        name = ollama.without_tag(body.model, served.__contains__)
        if name not in served:
            raise UnknownModel(name, *served)
        return json_answer(_shown(service, served[name], probes.model_type))

    for path, endpoint, summary in (
        ("/api/tags", tags, "A list with the served model and its adapters"),
        ("/api/ps", running, "The same list: all of them are loaded"),
        ("/api/version", version, "The version of Ollama whose API this is"),
    ):
        made.add_api_route(path, endpoint, **schema.operation(tag=schema.OLLAMA, summary=summary, error=OllamaError))
    schema.post(made, "/api/show", tag=schema.OLLAMA, summary="The model", body=OllamaShowBody, error=OllamaError)(show)
    return made


def _shown(service: Service, model: Model, family: str) -> dict[str, Any]:
    can = ["completion"] if service.pooling is None else ["embedding"]
    can += ["tools"] if service.formats.tools is not None else []
    can += ["thinking"] if service.formats.reasoning is not None else []
    return {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": {**ollama.DETAILS, "family": family, "families": [family]},
        "model_info": {"general.architecture": family, f"{family}.context_length": model.max_model_len},
        "capabilities": can,
        "modified_at": ollama.rfc3339(model.created),
    }
