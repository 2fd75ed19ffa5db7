"""How each type of engine turns a chat request into what its chat template is given.

The picker must arrive at the prompt that the engine will have, to the character: what differs is here, one module for
each engine whose rules were read from its source.
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
    """The dialect of an engine type as `spec.engine.type` names it, ours for one that has none of its own; `api` is the
    one that a chat was converted from, where the engine treats it in another way."""
    return _DIALECTS.get(f"{engine}/{api}") or _DIALECTS.get(engine, TREELINE)
