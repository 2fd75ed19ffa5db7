"""Bounds of the index."""

from __future__ import annotations

from dataclasses import dataclass

from treeline_epp.index.radix_tree import MAX_EDGE


@dataclass(frozen=True, slots=True)
class IndexLimits:
    """Bounds of memory. Text is stored once, however many pods hold it; a block costs about 100 bytes beyond it.

    A prediction lives `prediction_life_s`, for pods without events `eventless_life_s`; `*_bytes` bound a pod's
    predictions. `aged_life_s` is how long blocks count after a gap that could not be covered.
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
