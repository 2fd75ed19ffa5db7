"""Engines by name: their speed and their memory."""

from __future__ import annotations

from dataclasses import dataclass

from treeline_sim.model.engine import EngineConfig
from treeline_sim.model.speed import LLAMA_8B_H200, TINY_CPU


@dataclass(frozen=True)
class Preset:
    """An engine by name. `scale`: the load that it bears, relative to the engine for which traces define their
    rates.
    """

    summary: str
    engine: EngineConfig
    scale: float = 1.0


PRESETS: dict[str, Preset] = {
    "llama-8b-h200": Preset(
        "Llama-3.1-8B, bf16, one H200, at the speed of the hardware",
        EngineConfig(LLAMA_8B_H200, kv_tokens=910_000),
    ),
    "tiny-cpu": Preset(
        "our runtime with the tiny model on one core of a CPU, as it was measured",
        EngineConfig(
            TINY_CPU,
            kv_tokens=174_752,
            block_size=16,
            chunk_tokens=1024,
            max_running=64,
            mixed=False,
        ),
        scale=0.02,
    ),
}
DEFAULT = "llama-8b-h200"
