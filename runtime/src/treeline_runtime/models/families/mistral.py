"""Mistral 7B, Nemo, Small, and what else has their layout: Llama, with a window on every layer or on none."""

from __future__ import annotations

from dataclasses import replace

from treeline_runtime.models.families.base import Config, Family
from treeline_runtime.models.keys import words
from treeline_runtime.models.model_config import ModelConfig
from treeline_runtime.models.scoring import Scoring
from treeline_runtime.models.settings import FULL, SLIDING, ModelError, layer_types, windows


def window_on_all(common: ModelConfig, config: Config) -> Scoring:
    """`sliding_window` holds for every layer; null: there is none. Phi-3 has one that is longer than any context."""
    size = config.get("sliding_window")
    kinds = [FULL if size is None else SLIDING] * common.num_layers
    if layer_types(config, kinds) != kinds:  # transformers' classes of these families do not read it
        raise ModelError("config.json has layer_types that differ from what sliding_window says: which is it?")
    sizes = windows(kinds, size)
    return Scoring() if all(size >= common.longest_context for size in sizes if size) else Scoring(windows=sizes)


def _describe(common: ModelConfig, config: Config) -> ModelConfig:
    return replace(common, scoring=window_on_all(common, config))


MISTRAL = Family(
    "MistralForCausalLM",
    "mistral",
    _describe,
    reads=words("layer_types sliding_window"),
    defaults={"num_key_value_heads": 8, "eos_token_id": 2, "sliding_window": 4096},
)
