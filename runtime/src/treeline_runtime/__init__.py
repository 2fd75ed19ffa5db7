"""The runtime: an inference engine with a radix cache behind an OpenAI-compatible server.

`treeline_runtime.Engine` is the in-process engine. It is imported on first use, so that the HTTP process never loads
torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treeline_runtime.engine import Engine, EngineDead, GenerationError, Output
    from treeline_runtime.messages import CustomProcessor, SamplingParams

__all__ = ["CustomProcessor", "Engine", "EngineDead", "GenerationError", "Output", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name in ("CustomProcessor", "SamplingParams"):
        from treeline_runtime import messages

        return getattr(messages, name)
    if name in __all__:
        from treeline_runtime import engine

        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
