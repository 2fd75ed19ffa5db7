"""The supported model families, by architecture in config.json."""

from __future__ import annotations

from treeline_runtime.models.families import dense, gemma, moe, qwen_asr, qwen_vl, towers
from treeline_runtime.models.families.base import Family

__all__ = ["FAMILIES", "Family"]

FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        dense.LLAMA,
        dense.QWEN2,
        dense.QWEN3,
        dense.MISTRAL,
        gemma.GEMMA2,
        gemma.GEMMA3,
        dense.PHI3,
        dense.OLMO2,
        moe.MIXTRAL,
        moe.QWEN2_MOE,
        moe.QWEN3_MOE,
        moe.GPT_OSS,
        qwen_vl.QWEN2_5_VL,
        qwen_vl.QWEN3_VL,
        qwen_vl.QWEN3_VL_MOE,
        qwen_asr.QWEN3_ASR,
        towers.GEMMA3_VL,
        towers.INTERNVL,
    )
}
