"""Gemma 2 and the text models of Gemma 3: four norms a layer, windows on most layers, caps (2), two ropes (3)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from treeline_runtime.models.families.base import Config, Family
from treeline_runtime.models.model_config import ModelConfig, Norms, Scoring
from treeline_runtime.models.rope_config import RopeConfig, parse_rope
from treeline_runtime.models.settings import (
    FULL,
    SLIDING,
    ModelError,
    layer_types,
    needed,
    positive,
    windows,
    words,
)

_NORMS = Norms("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_ACTIVATION = ("hidden_activation", ("gelu_pytorch_tanh",))
_DEFAULTS: dict[str, Any] = {
    "eos_token_id": 1,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_NOT_USED = {"hidden_act": ("gelu_pytorch_tanh",), "use_bidirectional_attention": (False,)}
_READS = "attention_bias final_logit_softcapping layer_types query_pre_attn_scalar sliding_window"


def _gemma(common: ModelConfig, config: Config, every: int) -> ModelConfig:
    """every: one of so many layers, the last, has no window."""
    pattern = [FULL if (layer + 1) % every == 0 else SLIDING for layer in range(common.num_layers)]
    scalar = needed(config, "query_pre_attn_scalar")
    return replace(
        common,
        norms=_NORMS,
        norm_adds_one=True,
        activation="gelu_tanh",
        embedding_scale=common.hidden_size**0.5,
        logit_softcap=positive(config, "final_logit_softcapping"),
        scoring=Scoring(scalar**-0.5, None, windows(layer_types(config, pattern), config.get("sliding_window"))),
    )


def _gemma2(common: ModelConfig, config: Config) -> ModelConfig:
    # a remark of the first checkpoints, which transformers does not read
    if config.get("sliding_window_size") not in (None, config.get("sliding_window")):
        raise ModelError("config.json has sliding_window and another sliding_window_size: which is it?")
    model = _gemma(common, config, every=2)
    return replace(model, scoring=replace(model.scoring, softcap=positive(config, "attn_logit_softcapping")))


def _gemma3(common: ModelConfig, config: Config) -> ModelConfig:
    every = int(config["sliding_window_pattern"])
    if every < 1:
        raise ModelError(f"config.json: sliding_window_pattern must be at least 1, not {every}")
    model = replace(_gemma(common, config, every), qk_norm=True)
    return replace(model, local_rope=_rope_of(config, SLIDING, common.max_position) if model.scoring.windows else None)


def _rope_of(config: Config, kind: str, max_position: int) -> RopeConfig:
    """The rope of layers of that kind: from rope_parameters, or from older keys."""
    values = config.get("rope_parameters") or {}
    if unknown := sorted(set(values) - {FULL, SLIDING}):
        raise ModelError(f"rope settings that are not supported: {', '.join(unknown)}; they belong to a type of layer")
    given = dict(values.get(kind) or {})
    if kind == FULL:
        given |= config.get("rope_scaling") or {}
    given.setdefault("rope_theta", needed(config, "rope_theta" if kind == FULL else "rope_local_base_freq"))
    return parse_rope(given, config, max_position)


GEMMA2 = Family(
    "Gemma2ForCausalLM",
    "gemma2",
    _gemma2,
    reads=words(f"{_READS} attn_logit_softcapping sliding_window_size"),
    defaults=_DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    not_used=_NOT_USED,
    activation=_ACTIVATION,
)
GEMMA3 = Family(
    "Gemma3ForCausalLM",
    "gemma3_text",
    _gemma3,
    reads=words(f"{_READS} rope_local_base_freq sliding_window_pattern"),
    defaults=_DEFAULTS | {"rope_local_base_freq": 1e4, "rope_theta": 1e6, "sliding_window_pattern": 6},
    not_used=_NOT_USED | {"_sliding_window_pattern": (6,)},
    activation=_ACTIVATION,
    rope=lambda config, max_position: _rope_of(config, FULL, max_position),
)
