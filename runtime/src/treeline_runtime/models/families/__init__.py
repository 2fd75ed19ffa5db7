"""The families of models that are served, by the architecture that config.json names."""

from __future__ import annotations

from treeline_runtime.models.families import gemma, gpt_oss, llama, mistral, moe, olmo, phi, qwen
from treeline_runtime.models.families.base import Family

__all__ = ["FAMILIES", "Family"]

FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        llama.LLAMA,
        qwen.QWEN2,
        qwen.QWEN3,
        mistral.MISTRAL,
        gemma.GEMMA2,
        gemma.GEMMA3,
        phi.PHI3,
        olmo.OLMO2,
        moe.MIXTRAL,
        moe.QWEN2_MOE,
        moe.QWEN3_MOE,
        gpt_oss.GPT_OSS,
    )
}
