"""gpt-oss: biases everywhere, attention sinks, a window on every other layer, experts with a clamped gate in 4 bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from treeline_runtime.models.families.base import Config, Family
from treeline_runtime.models.families.moe import count_experts, whole
from treeline_runtime.models.keys import words
from treeline_runtime.models.model_config import ClampedGate, ModelConfig, MoeConfig
from treeline_runtime.models.rope_config import RopeConfig, read_rope
from treeline_runtime.models.scoring import Scoring
from treeline_runtime.models.settings import FULL, SLIDING, ModelError, flag, layer_types, positive, windows

_THETA = 150000.0
_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _describe(common: ModelConfig, config: Config) -> ModelConfig:
    experts, top_k = count_experts(config, "num_local_experts", "num_experts")
    if config.get("experts_per_token") not in (None, top_k):  # a remark, which transformers does not read
        raise ModelError("config.json has num_experts_per_tok and another experts_per_token: which is it?")
    alpha, limit = positive(config, "swiglu_alpha"), positive(config, "swiglu_limit")
    if alpha is None or limit is None:
        raise ModelError("config.json: swiglu_alpha and swiglu_limit must be numbers above 0, not null")
    pattern = [FULL if layer % 2 else SLIDING for layer in range(common.num_layers)]
    bias = flag(config, "attention_bias")
    return replace(
        common,
        qkv_bias=bias,
        o_bias=bias,
        scoring=Scoring(windows=windows(layer_types(config, pattern), config.get("sliding_window")), sinks=True),
        moe=MoeConfig(
            num_experts=experts,
            top_k=top_k,
            intermediate_size=whole(config, "intermediate_size"),
            normalise=True,  # the softmax is over a token's experts alone, which comes to the same
            shared_intermediate_size=0,
            layers=frozenset(range(common.num_layers)),
            clamped=ClampedGate(alpha, limit),
        ),
    )


def _rope(config: Config, max_position: int) -> RopeConfig:
    """null for its base is as good as a missing key."""
    theta = _THETA if config.get("rope_theta") is None else config["rope_theta"]
    given = config.get("rope_scaling") or config.get("rope_parameters") or _ROPE
    return read_rope({**config, "rope_theta": theta, "rope_scaling": given}, max_position)


GPT_OSS = Family(
    "GptOssForCausalLM",
    "gpt_oss",
    _describe,
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
    rope=_rope,
    quant_method="mxfp4",
)
