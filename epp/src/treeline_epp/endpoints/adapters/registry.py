"""The adapters by engine type, as discovery names it."""

from __future__ import annotations

from treeline_epp.endpoints.adapters.base import EngineAdapter
from treeline_epp.endpoints.adapters.openai import OpenAIAdapter
from treeline_epp.endpoints.adapters.sglang import SGLangAdapter
from treeline_epp.endpoints.adapters.treeline import TreelineAdapter
from treeline_epp.endpoints.adapters.vllm import VllmAdapter

ADAPTERS: dict[str, EngineAdapter] = {
    adapter.name: adapter for adapter in (TreelineAdapter(), SGLangAdapter(), VllmAdapter(), OpenAIAdapter())
}


def adapter_of(engine: str) -> EngineAdapter:
    """The adapter of an engine type; for one that is not known, the one that asks for all there might be."""
    return ADAPTERS.get(engine, ADAPTERS["treeline"])
