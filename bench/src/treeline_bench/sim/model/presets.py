"""Engines by name: how fast they are, and how much memory they have."""

from __future__ import annotations

from dataclasses import dataclass

from treeline_bench.sim.model.engine import EngineConfig
from treeline_bench.sim.model.measured import read
from treeline_bench.sim.model.speed import LLAMA_8B_H200


@dataclass(frozen=True)
class Preset:
    """`scale`: the load that it bears, by that of the one for which traces name their rates."""

    summary: str
    engine: EngineConfig
    scale: float = 1.0


_TINY = read("tiny-cpu")
PRESETS: dict[str, Preset] = {
    "llama-8b-h200": Preset(
        "Llama-3.1-8B, bf16, one H200, at the speed of the hardware",
        EngineConfig(LLAMA_8B_H200, kv_tokens=910_000),
    ),
    "tiny-cpu": Preset(
        "our runtime with the tiny model on one core of a CPU, as measured by `treeline sim calibrate`",
        EngineConfig(
            _TINY.speed,
            kv_tokens=174_752,
            block_size=16,
            chunk_tokens=_TINY.chunk_tokens,
            max_running=64,
            mixed=False,
        ),
        scale=0.02,
    ),
}
DEFAULT = "llama-8b-h200"
