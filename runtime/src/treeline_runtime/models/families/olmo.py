"""OLMo 2: norms after attention and feed-forward instead of before, and over all queries and all keys of a token."""

from __future__ import annotations

from dataclasses import replace

from treeline_runtime.models.families.base import Config, Family
from treeline_runtime.models.keys import words
from treeline_runtime.models.model_config import ModelConfig, Norms
from treeline_runtime.models.settings import flag

_NORMS = Norms(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm")


def _describe(common: ModelConfig, config: Config) -> ModelConfig:
    bias = flag(config, "attention_bias")
    return replace(common, qkv_bias=bias, o_bias=bias, norms=_NORMS, qk_norm=True, qk_norm_over_heads=True)


OLMO2 = Family(
    "Olmo2ForCausalLM",
    "olmo2",
    _describe,
    reads=words("attention_bias"),
    defaults={"eos_token_id": 50279, "rms_norm_eps": 1e-5},
)
