"""vLLM: an OpenAI-compatible server. It does not say where it publishes KV events: it is routed by history and load."""

from __future__ import annotations

from treeline_epp.endpoints.adapters.openai import OpenAIAdapter


class VllmAdapter(OpenAIAdapter):
    """See the module."""

    name = "vllm"
