"""Bounds of the index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from treeline_wire.events import BlockRemoved, BlockStored, Event

from treeline_epp.index.radix_tree import MAX_EDGE

SLICE: Final = 128
"""Weight that is handled in one go: half a millisecond, on a busy machine two."""
LOWER_SHARE: Final = 0.75
"""Share of these bounds up to which blocks of lower tiers are taken: disks hold more than all devices, and must not
take their place.
"""
_EACH: Final = 8
_CLEARED: Final = 64
_REMOVED: Final = 4
_TOKENS: Final = 32
"""Tokens that cost as much as a stored block."""


def weight(event: Event) -> int:
    """Return an event's cost in stored blocks of 16 tokens, each of 3 to 4 µs: a block removed out of order costs 20
    µs, an event of one block 25. O(1).
    """
    if isinstance(event, BlockStored):
        return _EACH + max(len(event.block_hashes), len(event.token_ids) // _TOKENS)
    if isinstance(event, BlockRemoved):
        return _EACH + _REMOVED * len(event.block_hashes)
    return _CLEARED


@dataclass(frozen=True, slots=True)
class IndexLimits:
    """Bounds of memory. Text is stored once, however many pods hold it; a block costs about 100 bytes beyond it.

    A prediction lives `prediction_life_s`, for pods without events `eventless_life_s`; `*_bytes` bound a pod's
    predictions. Blocks count for `aged_life_s` after a gap that could not be covered.
    """

    max_text_bytes: int = 4 << 30
    max_blocks: int = 16_000_000
    max_orphan_blocks: int = 65_536
    prediction_life_s: float = 10.0
    prediction_bytes: int = 64 << 20
    eventless_life_s: float = 600.0
    eventless_bytes: int = 64 << 20
    aged_life_s: float = 120.0
    hit_cap_life_s: float = 30.0
    max_edge: int = MAX_EDGE
