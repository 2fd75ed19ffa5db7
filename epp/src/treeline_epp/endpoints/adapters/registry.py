"""The adapters by engine type, and which one fits an engine whose type is not configured."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from treeline_epp.endpoints.adapters.base import EngineAdapter
from treeline_epp.endpoints.adapters.openai import Models, OpenAIAdapter
from treeline_epp.endpoints.adapters.sglang import SGLangAdapter
from treeline_epp.endpoints.adapters.treeline import TreelineAdapter
from treeline_epp.endpoints.adapters.vllm import VllmAdapter
from treeline_epp.endpoints.engine_http import EngineError, EngineHttp, RefusedError

T = TypeVar("T")

ADAPTERS: dict[str, EngineAdapter] = {
    adapter.name: adapter for adapter in (TreelineAdapter(), SGLangAdapter(), VllmAdapter(), OpenAIAdapter())
}
"""In the order in which they are recognised: the first whose name or signs an engine shows."""

ANYTHING = ADAPTERS["openai"]
PROBES = tuple(dict.fromkeys(path for adapter in ADAPTERS.values() for path in adapter.probes))
"""Probes of an engine whose type is not known yet."""

_SIGNS = msgspec.defstruct(
    "Signs",
    [
        (sign, msgspec.Raw | msgspec.UnsetType, msgspec.UNSET)
        for sign in sorted(frozenset().union(*(adapter.signs for adapter in ADAPTERS.values())))
    ],
)
"""The members of `/server_info` that identify an engine; only their presence is read, and nothing else."""


def adapter_of(engine: str) -> EngineAdapter | None:
    """Return the adapter of an engine type as discovery names it. None for an unknown type ("custom"), and where
    discovery names none: `recognise` it.
    """
    return ADAPTERS.get(engine)


async def recognise(http: EngineHttp) -> EngineAdapter:
    """Choose the adapter by `owned_by` in `/v1/models`, else by `/server_info`. A vLLM that asks for an API key is
    recognised by its version.

    Raises `EngineError` if it has no usable list of models: then it serves nothing yet.
    """
    try:
        served = await http.document("/v1/models", Models)
    except RefusedError:
        return ADAPTERS["vllm"] if await _tells(http, "/version", _Version) else ANYTHING
    owners = [model.owner for model in served.data] if served is not None else []
    for adapter in ADAPTERS.values():
        if adapter.owner and adapter.owner in owners:
            return adapter
    about = await _tells(http, "/server_info", _SIGNS)
    shown = {sign for sign in _SIGNS.__struct_fields__ if getattr(about, sign, msgspec.UNSET) is not msgspec.UNSET}
    return next((adapter for adapter in ADAPTERS.values() if adapter.signs & shown), ANYTHING)


class _Version(msgspec.Struct):
    version: str


async def _tells(http: EngineHttp, path: str, into: type[T]) -> T | None:
    """Return the document, or None if there is none of this shape: another server may answer there."""
    try:
        return await http.document(path, into)
    except EngineError:
        return None
