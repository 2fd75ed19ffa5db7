"""Families whose feed-forward is a mixture of experts, on some layers or all.

- Mixtral, Qwen2-MoE and Qwen3-MoE: dense families with experts. Windows are not those of Qwen2 and Qwen3: in Qwen2-MoE
  every other layer up to `max_window_layers` has one, in Qwen3-MoE all have.
- gpt-oss: biases everywhere, attention sinks, a window on every other layer, experts with a clamped gate in 4 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from treeline_runtime.models.families.base import Config, Family
from treeline_runtime.models.families.dense import window_on_all
from treeline_runtime.models.model_config import ClampedGate, ModelConfig, MoeConfig, Scoring
from treeline_runtime.models.rope_config import RopeConfig, read_rope
from treeline_runtime.models.settings import (
    FULL,
    SLIDING,
    ModelError,
    flag,
    layer_types,
    positive,
    whole,
    windows,
    words,
)

QWEN = words(
    "decoder_sparse_step layer_types mlp_only_layers moe_intermediate_size norm_topk_prob num_experts "
    "num_experts_per_tok sliding_window use_sliding_window"
)
_BIAS_UNREAD: dict[str, tuple[object, ...]] = {"attention_bias": (False, True)}
"""transformers ignores this key."""


def _on_all_layers(common: ModelConfig, config: Config) -> MoeConfig:
    experts, top_k = count_experts(config, "num_local_experts", "num_experts")
    layers = frozenset(range(common.num_layers))
    return MoeConfig(experts, top_k, whole(config, "intermediate_size"), layers)


def _qwen2(common: ModelConfig, config: Config) -> ModelConfig:
    size = config.get("sliding_window") if flag(config, "use_sliding_window") else None
    before = 0 if size is None else int(config["max_window_layers"])
    pattern = [SLIDING if layer < before and layer % 2 == 0 else FULL for layer in range(common.num_layers)]
    return replace(
        common,
        qkv_bias=flag(config, "qkv_bias"),
        moe=qwen_moe(common, config, whole(config, "shared_expert_intermediate_size"), "num_experts"),
        scoring=Scoring(windows=windows(layer_types(config, pattern), size)),
    )


def _qwen3(common: ModelConfig, config: Config) -> ModelConfig:
    window = config.get("sliding_window") if flag(config, "use_sliding_window") else None
    return replace(
        common,
        qk_norm=True,
        moe=qwen_moe(common, config, 0, "num_experts", "num_local_experts"),
        scoring=window_on_all(common, {**config, "sliding_window": window}),
    )


def qwen_moe(common: ModelConfig, config: Config, shared: int, *counts: str) -> MoeConfig:
    experts, top_k = count_experts(config, *counts)
    return MoeConfig(
        num_experts=experts,
        top_k=top_k,
        intermediate_size=whole(config, "moe_intermediate_size"),
        layers=_sparse_layers(config, common.num_layers),
        normalise=flag(config, "norm_topk_prob"),
        shared_intermediate_size=shared,
    )


def _sparse_layers(config: Config, layers: int) -> frozenset[int]:
    """Every decoder_sparse_step-th layer, the first at step - 1, except mlp_only_layers."""
    step = 1 if config.get("decoder_sparse_step") is None else whole(config, "decoder_sparse_step")
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise ModelError(f"config.json: mlp_only_layers must be a list of layers' numbers, not {dense!r}")
    return frozenset(range(step - 1, layers, step)) - frozenset(dense)


def count_experts(config: Mapping[str, Any], *keys: str) -> tuple[int, int]:
    """The number of experts, from either key, and how many a token uses."""
    said = [whole(config, key) for key in keys if config.get(key) is not None]
    if not said:
        raise ModelError(f"config.json lacks {keys[0]!r}")
    if min(said) != max(said):
        raise ModelError(f"config.json: {' and '.join(keys)} differ: which is it?")
    top_k = whole(config, "num_experts_per_tok")
    if top_k > said[0]:
        raise ModelError(f"config.json: a token goes to num_experts_per_tok = {top_k} experts, but there are {said[0]}")
    return said[0], top_k


def _mixtral_rope(config: Config, max_position: int) -> RopeConfig:
    """A null base counts as missing."""
    theta = 1e6 if config.get("rope_theta") is None else config["rope_theta"]
    return read_rope({**config, "rope_theta": theta}, max_position)


MIXTRAL = Family(
    "MixtralForCausalLM",
    "mixtral",
    lambda common, config: replace(common, moe=_on_all_layers(common, config), scoring=window_on_all(common, config)),
    reads=words("layer_types num_experts num_experts_per_tok num_local_experts sliding_window"),
    defaults={"eos_token_id": 2, "num_experts_per_tok": 2, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    not_used=_BIAS_UNREAD,
    rope=_mixtral_rope,
)
QWEN2_MOE = Family(
    "Qwen2MoeForCausalLM",
    "qwen2_moe",
    _qwen2,
    reads=QWEN | words("max_window_layers qkv_bias shared_expert_intermediate_size"),
    defaults={
        "max_window_layers": 28,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 16,
        "qkv_bias": True,
        "sliding_window": 4096,
    },
    not_used=_BIAS_UNREAD,
)
QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    _qwen3,
    reads=QWEN | words("attention_bias num_local_experts"),
    defaults={"num_experts_per_tok": 8, "num_key_value_heads": 4, "sliding_window": 4096},
)


_GPT_OSS_THETA = 150000.0
_GPT_OSS_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _gpt_oss(common: ModelConfig, config: Config) -> ModelConfig:
    moe = _on_all_layers(common, config)  # the softmax is over a token's experts alone: normalising comes to the same
    if config.get("experts_per_token") not in (None, moe.top_k):  # a remark, which transformers does not read
        raise ModelError("config.json has num_experts_per_tok and another experts_per_token: which is it?")
    alpha, limit = positive(config, "swiglu_alpha"), positive(config, "swiglu_limit")
    if alpha is None or limit is None:
        raise ModelError("config.json: swiglu_alpha and swiglu_limit must be numbers above 0, not null")
    pattern = [FULL if layer % 2 else SLIDING for layer in range(common.num_layers)]
    return replace(
        common,
        scoring=Scoring(windows=windows(layer_types(config, pattern), config.get("sliding_window")), sinks=True),
        moe=replace(moe, clamped=ClampedGate(alpha, limit)),
    )


def _gpt_oss_rope(config: Config, max_position: int) -> RopeConfig:
    """A null base counts as missing."""
    theta = _GPT_OSS_THETA if config.get("rope_theta") is None else config["rope_theta"]
    given = config.get("rope_scaling") or config.get("rope_parameters") or _GPT_OSS_ROPE
    return read_rope({**config, "rope_theta": theta, "rope_scaling": given}, max_position)


GPT_OSS = Family(
    "GptOssForCausalLM",
    "gpt_oss",
    _gpt_oss,
    reads=words(
        "attention_bias experts_per_token layer_types num_experts num_experts_per_tok num_local_experts "
        "quantization_config sliding_window swiglu_alpha swiglu_limit"
    ),
    defaults={
        "attention_bias": True,
        "head_dim": 64,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    not_used={"initial_context_length": (4096,)},
    rope=_gpt_oss_rope,
    quant_method="mxfp4",
)
