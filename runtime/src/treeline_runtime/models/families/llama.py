"""Llama 2 and 3, and the many that are published as Llama."""

from __future__ import annotations

from dataclasses import replace

from treeline_runtime.models.families.base import Config, Family
from treeline_runtime.models.keys import words
from treeline_runtime.models.model_config import ModelConfig
from treeline_runtime.models.settings import flag


def _describe(common: ModelConfig, config: Config) -> ModelConfig:
    bias = flag(config, "attention_bias")
    return replace(common, qkv_bias=bias, o_bias=bias, mlp_bias=flag(config, "mlp_bias"))


LLAMA = Family(
    "LlamaForCausalLM",
    "llama",
    _describe,
    reads=words("attention_bias mlp_bias"),
    defaults={"eos_token_id": 2},
)
