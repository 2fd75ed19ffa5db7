"""Any engine with an OpenAI-compatible server: its models are known, and it is routed by history and load."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta
from treeline_wire.tokenizer import TokenizerBundle

from treeline_epp.endpoints.adapters.base import EngineInfo
from treeline_epp.endpoints.engine_http import EngineError, EngineHttp


class _Model(msgspec.Struct):
    id: Annotated[str, Meta(min_length=1, max_length=512)]


class _Models(msgspec.Struct):
    data: Annotated[list[_Model], Meta(max_length=4096)]


class OpenAIAdapter:
    """See the module."""

    name = "openai"
    probes: tuple[str, ...] = ("/health",)

    async def models(self, http: EngineHttp) -> tuple[str, ...]:
        """The names that it serves. Raises `EngineError`."""
        served = await http.document("/v1/models", _Models)
        if served is None:
            raise EngineError(f"{http.base} has no /v1/models")
        return tuple(model.id for model in served.data)

    async def info(self, http: EngineHttp) -> EngineInfo:
        """Its models. Raises `EngineError`."""
        return EngineInfo(await self.models(http))

    async def tokenizer(self, http: EngineHttp) -> TokenizerBundle:
        """It has none to give. Raises `EngineError`."""
        raise EngineError(f"{http.base} serves no tokenizer")
