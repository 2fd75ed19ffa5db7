"""Phi-3, 3.5 and 4: packed projections, longrope, and in Phi-4-mini heads that are rotated in part."""

from __future__ import annotations

from dataclasses import replace

from treeline_runtime.models.families.base import Config, Family
from treeline_runtime.models.families.mistral import window_on_all
from treeline_runtime.models.keys import words
from treeline_runtime.models.model_config import ModelConfig
from treeline_runtime.models.rope_config import RopeConfig, parse_rope
from treeline_runtime.models.settings import ModelError

_OLD_NAMES = ("su", "yarn")
"""What longrope was called when the first of them were published."""


def _rope(config: Config, max_position: int) -> RopeConfig:
    values = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind in _OLD_NAMES:
        values["rope_type"] = kind = "longrope"
    if kind not in ("default", "longrope"):
        raise ModelError(f"rope type {kind!r} is not supported for this architecture; supported: default, longrope")
    return parse_rope(values, config, max_position)


def _describe(common: ModelConfig, config: Config) -> ModelConfig:
    return replace(common, packed=True, scoring=window_on_all(common, config))


PHI3 = Family(
    "Phi3ForCausalLM",
    "phi3",
    _describe,
    reads=words("layer_types sliding_window"),
    defaults={"eos_token_id": 32000, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    not_used={
        "full_attn_mod": (1,),
        "interpolate_factor": (1,),
        "lm_head_bias": (False,),
    },
    partial_rotary=True,
    rope=_rope,
)
