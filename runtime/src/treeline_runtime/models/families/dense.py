"""Families whose layers are all dense and alike.

- Llama 2 and 3, and the many that are published as Llama.
- Mistral 7B, Nemo, Small, and others with their layout: Llama, with a window on every layer or on none.
- Qwen2 and 2.5 (biases on queries, keys and values), Qwen3 (norms of queries and keys instead). With
  `use_sliding_window` the layers from `max_window_layers` on have a window, if `layer_types` does not say which.
- Phi-3, 3.5 and 4: packed projections, longrope, and in Phi-4-mini heads that are rotated in part.
- OLMo 2: norms after attention and feed-forward instead of before, and over all queries and all keys of a token.
"""

from __future__ import annotations

from dataclasses import replace

from treeline_runtime.models.families.base import Config, Family
from treeline_runtime.models.model_config import ModelConfig, Norms, Scoring
from treeline_runtime.models.rope_config import RopeConfig, parse_rope
from treeline_runtime.models.settings import FULL, SLIDING, ModelError, flag, layer_types, windows, words

LLAMA = Family(
    "LlamaForCausalLM",
    "llama",
    lambda common, config: replace(common, mlp_bias=flag(config, "mlp_bias")),
    reads=words("attention_bias mlp_bias"),
    defaults={"eos_token_id": 2},
)


def window_on_all(common: ModelConfig, config: Config) -> Scoring:
    """`sliding_window` applies to every layer; null: none. Phi-3's is longer than any context."""
    size = config.get("sliding_window")
    kinds = [FULL if size is None else SLIDING] * common.num_layers
    if layer_types(config, kinds) != kinds:  # transformers' classes of these families do not read it
        raise ModelError("config.json has layer_types that differ from what sliding_window says: which is it?")
    sizes = windows(kinds, size)
    return Scoring() if all(size >= common.longest_context for size in sizes if size) else Scoring(windows=sizes)


MISTRAL = Family(
    "MistralForCausalLM",
    "mistral",
    lambda common, config: replace(common, scoring=window_on_all(common, config)),
    reads=words("layer_types sliding_window"),
    defaults={"num_key_value_heads": 8, "eos_token_id": 2, "sliding_window": 4096},
)


_QWEN_WINDOW = "layer_types max_window_layers sliding_window use_sliding_window"
_QWEN_DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}


def _qwen_scoring(common: ModelConfig, config: Config) -> Scoring:
    size = config.get("sliding_window") if flag(config, "use_sliding_window") else None
    full = common.num_layers if size is None else int(config["max_window_layers"])
    pattern = [FULL if layer < full else SLIDING for layer in range(common.num_layers)]
    return Scoring(windows=windows(layer_types(config, pattern), size))


QWEN2 = Family(
    "Qwen2ForCausalLM",
    "qwen2",
    lambda common, config: replace(common, qkv_bias=True, scoring=_qwen_scoring(common, config)),
    reads=words(_QWEN_WINDOW),
    defaults=_QWEN_DEFAULTS,
    not_used={"attention_bias": (False, True)},
)
QWEN3 = Family(
    "Qwen3ForCausalLM",
    "qwen3",
    lambda common, config: replace(common, qk_norm=True, scoring=_qwen_scoring(common, config)),
    reads=words(f"attention_bias {_QWEN_WINDOW}"),
    defaults=_QWEN_DEFAULTS | {"head_dim": 128},
)


_OLD_NAMES = ("su", "yarn")
"""The old name of longrope."""


def _phi3_rope(config: Config, max_position: int) -> RopeConfig:
    values = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind in _OLD_NAMES:
        values["rope_type"] = kind = "longrope"
    if kind not in ("default", "longrope"):
        raise ModelError(f"rope type {kind!r} is not supported for this architecture; supported: default, longrope")
    return parse_rope(values, config, max_position)


PHI3 = Family(
    "Phi3ForCausalLM",
    "phi3",
    lambda common, config: replace(common, packed=True, scoring=window_on_all(common, config)),
    reads=words("layer_types sliding_window"),
    defaults={"eos_token_id": 32000, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    not_used={
        "full_attn_mod": (1,),
        "interpolate_factor": (1,),
        "lm_head_bias": (False,),
    },
    partial_rotary=True,
    rope=_phi3_rope,
)


_OLMO2_NORMS = Norms(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm")


OLMO2 = Family(
    "Olmo2ForCausalLM",
    "olmo2",
    lambda common, config: replace(common, norms=_OLMO2_NORMS, qk_norm=True, qk_norm_over_heads=True),
    reads=words("attention_bias"),
    defaults={"eos_token_id": 50279, "rms_norm_eps": 1e-5},
)
