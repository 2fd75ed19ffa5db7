"""The dialects: one module per engine that turns a chat request into the input of its chat template.

The picker must compute the engine's prompt exactly, so each dialect is written from the engine's source.
"""

from __future__ import annotations

from typing import Final

from .base import ChatDialect
from .sglang import SglangDialect
from .treeline import TreelineDialect
from .vllm import VllmDialect

__all__ = ["TREELINE", "ChatDialect", "dialect_of"]

TREELINE: Final = TreelineDialect()
_DIALECTS: Final[dict[str, ChatDialect]] = {
    "vllm": VllmDialect(),
    "vllm/responses": VllmDialect(validated=False),
    "sglang": SglangDialect(),
}


def dialect_of(engine: str, api: str = "") -> ChatDialect:
    """Returns the dialect of an engine type (`spec.engine.type`), ours if it has none. `api`: the API that the chat was
    converted from, if the engine treats that differently.
    """
    return _DIALECTS.get(f"{engine}/{api}") or _DIALECTS.get(engine, TREELINE)
