"""How each engine turns a chat request into its chat template's input.

The picker must compute the engine's prompt exactly. The differences are here, one module per engine, written from its
source.
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
    """The dialect of an engine type (`spec.engine.type`), ours if it has none. `api`: what the chat was converted from,
    if the engine treats that differently."""
    return _DIALECTS.get(f"{engine}/{api}") or _DIALECTS.get(engine, TREELINE)
