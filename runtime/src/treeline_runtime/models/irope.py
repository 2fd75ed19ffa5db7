"""How Llama 4's layers know positions, in the words that config.json and models share. No torch here.

Meta calls it iRoPE: some layers rotate queries and keys and see only their chunk, those between ("NoPE") do neither.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Temperature:
    """Queries at position p are multiplied by 1 + scale x log(1 + floor((p + 1) / floor)), since attention over more
    tokens spreads (https://arxiv.org/abs/2501.19399)."""

    floor: float
    """Tokens."""
    scale: float


@dataclass(frozen=True)
class IRope:
    """Of a decoder whose layers differ so."""

    rotated: frozenset[int]
    """Layers that rotate queries and keys. `ModelConfig.qk_norm` is about these alone, and has no weights."""
    temperature: Temperature | None
    """Of the layers that do not; None: their queries stay as they are."""
