"""Any engine with an OpenAI-compatible server: its models are known, and it is routed by history and load."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from treeline_wire.tokenizer import TokenizerBundle

from treeline_epp.endpoints.adapters.base import EngineInfo
from treeline_epp.endpoints.engine_http import EngineError, EngineHttp

_LONGEST_NAME = 512


class _Model(msgspec.Struct):
    id: Annotated[str, Meta(min_length=1, max_length=_LONGEST_NAME)]
    parent: Any = None

    @property
    def base(self) -> str:
        """The model that it is an adapter of; empty where it is none."""
        known = isinstance(self.parent, str) and self.parent != self.id and len(self.parent) <= _LONGEST_NAME
        return self.parent if known else ""


class _Models(msgspec.Struct):
    data: Annotated[list[_Model], Meta(max_length=4096)]


class Served(msgspec.Struct, frozen=True):
    """The names that an engine serves; `adapters` as in `EngineInfo`."""

    names: tuple[str, ...]
    adapters: dict[str, str] = {}


class OpenAIAdapter:
    """See the module."""

    name = "openai"
    probes: tuple[str, ...] = ("/health",)

    async def models(self, http: EngineHttp) -> Served:
        """What it serves. A model with a parent is an adapter; vLLM and SGLang both list them so. Raises
        `EngineError`."""
        served = await http.document("/v1/models", _Models)
        if served is None:
            raise EngineError(f"{http.base} has no /v1/models")
        adapters = {self.adapter_name(one.base, one.id): one.id for one in served.data if one.base}
        names = (self.adapter_name(one.base, one.id) if one.base else one.id for one in served.data)
        return Served(tuple(names), adapters)

    def adapter_name(self, base: str, adapter: str) -> str:
        """The model that one asks for to get an adapter of `base`."""
        return adapter

    async def info(self, http: EngineHttp) -> EngineInfo:
        """Its models. Raises `EngineError`."""
        served = await self.models(http)
        return EngineInfo(served.names, adapters=served.adapters)

    async def tokenizer(self, http: EngineHttp) -> TokenizerBundle:
        """It has none to give. Raises `EngineError`."""
        raise EngineError(f"{http.base} serves no tokenizer")
