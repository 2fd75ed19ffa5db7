"""Qwen2 and 2.5 (biases on queries, keys and values), Qwen3 (norms of queries and keys instead).

With `use_sliding_window` the layers from `max_window_layers` on have a window, if `layer_types` does not say which.
"""

from __future__ import annotations

from dataclasses import replace

from treeline_runtime.models.families.base import Config, Family
from treeline_runtime.models.keys import words
from treeline_runtime.models.model_config import ModelConfig
from treeline_runtime.models.scoring import Scoring
from treeline_runtime.models.settings import FULL, SLIDING, flag, layer_types, windows

_WINDOW = "layer_types max_window_layers sliding_window use_sliding_window"
_DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}


def _scoring(common: ModelConfig, config: Config) -> Scoring:
    size = config.get("sliding_window") if flag(config, "use_sliding_window") else None
    full = common.num_layers if size is None else int(config["max_window_layers"])
    pattern = [FULL if layer < full else SLIDING for layer in range(common.num_layers)]
    return Scoring(windows=windows(layer_types(config, pattern), size))


def _qwen2(common: ModelConfig, config: Config) -> ModelConfig:
    return replace(common, qkv_bias=True, scoring=_scoring(common, config))


def _qwen3(common: ModelConfig, config: Config) -> ModelConfig:
    bias = flag(config, "attention_bias")
    return replace(common, qkv_bias=bias, o_bias=bias, qk_norm=True, scoring=_scoring(common, config))


QWEN2 = Family(
    "Qwen2ForCausalLM",
    "qwen2",
    _qwen2,
    reads=words(_WINDOW),
    defaults=_DEFAULTS,
    not_used={"attention_bias": (False, True)},
)
QWEN3 = Family(
    "Qwen3ForCausalLM",
    "qwen3",
    _qwen3,
    reads=words(f"attention_bias {_WINDOW}"),
    defaults=_DEFAULTS | {"head_dim": 128},
)
