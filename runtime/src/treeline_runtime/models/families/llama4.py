"""The text models of Llama 4: attention in chunks, layers without rope, a sigmoid router and a shared expert."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from treeline_runtime.models.families.base import Config, Family, words
from treeline_runtime.models.families.moe import count_experts, whole
from treeline_runtime.models.irope import IRope, Temperature
from treeline_runtime.models.model_config import ModelConfig
from treeline_runtime.models.moe_config import MoeConfig
from treeline_runtime.models.rope_config import RopeConfig, read_rope
from treeline_runtime.models.scoring import Scoring
from treeline_runtime.models.settings import CHUNKED, FULL, ModelError, flag, layer_types, needed, windows

_THETA = 500000.0
_SCALED = ("yarn", "longrope")
"""Types of rope that change the length of what they rotate."""


def _describe(common: ModelConfig, config: Config) -> ModelConfig:
    """attention_chunk_size null: there are no chunks, as in Llama Guard 4."""
    layers = common.num_layers
    moe = _moe(config, layers)
    if moe is None and common.quantization is not None:  # scales would have to follow rows of queries and keys
        raise ModelError(f"fp8 weights are not supported for {common.architecture}; take the unquantised checkpoint")
    bias, norm = flag(config, "attention_bias"), flag(config, "use_qk_norm")
    if norm and common.rope.type in _SCALED:  # the norm is moved before the rotation, which must not change it
        raise ModelError(f"rope type {common.rope.type!r} is not supported for Llama 4 with use_qk_norm")
    rotated = _rotated(config, layers)
    kinds = layer_types(config, [CHUNKED if layer in rotated else FULL for layer in range(layers)], CHUNKED)
    size = config.get("attention_chunk_size")
    chunks = () if size is None else windows(kinds, size, CHUNKED, "attention_chunk_size")
    return replace(
        common,
        intermediate_size=whole(config, "intermediate_size_mlp"),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=norm,
        scoring=Scoring(windows=chunks, chunked=bool(chunks)),
        irope=IRope(rotated, _temperature(config)),
        moe=moe,
    )


def _moe(config: Config, layers: int) -> MoeConfig | None:
    """None where moe_layers has none: then nothing else that is said of experts matters (Llama Guard 4 has 0)."""
    if config.get("moe_layers") == []:
        return None
    experts, top_k = count_experts(config, "num_local_experts")
    return MoeConfig(
        num_experts=experts,
        top_k=top_k,
        intermediate_size=whole(config, "intermediate_size"),
        normalise=False,
        shared_intermediate_size=whole(config, "intermediate_size"),
        layers=_sparse(config, layers),
    )


def _rotated(config: Config, layers: int) -> frozenset[int]:
    """no_rope_layers has, despite its name, a 1 for each layer with rope. An empty one is as good as none: then every
    no_rope_layer_interval-th layer has no rope."""
    given = config.get("no_rope_layers")
    if not given:
        every = whole(config, "no_rope_layer_interval")
        return frozenset(layer for layer in range(layers) if (layer + 1) % every)
    if not isinstance(given, list) or len(given) != layers or any(value not in (0, 1) for value in given):
        raise ModelError(f"config.json: no_rope_layers must have a 0 or 1 for each of {layers} layers, not {given!r}")
    return frozenset(layer for layer in range(layers) if given[layer])


def _sparse(config: Config, layers: int) -> frozenset[int]:
    """moe_layers; where it is missing every interleave_moe_layer_step-th layer has experts."""
    given = config.get("moe_layers")
    if given is None:
        step = whole(config, "interleave_moe_layer_step")
        return frozenset(range(step - 1, layers, step))
    if not isinstance(given, list) or any(type(layer) is not int for layer in given):
        raise ModelError(f"config.json: moe_layers must be a list of layers' numbers, not {given!r}")
    if outside := [layer for layer in given if not 0 <= layer < layers]:
        raise ModelError(f"config.json: moe_layers has layer {outside[0]}, but there are {layers}")
    return frozenset(given)


def _temperature(config: Config) -> Temperature | None:
    tuning = config.get("attn_temperature_tuning")  # true; the first files have 4, which means no more
    if not isinstance(tuning, int | float):
        raise ModelError(f"config.json: attn_temperature_tuning must be true or false, not {tuning!r}")
    if not tuning:
        return None
    if not isinstance(scale := config.get("attn_scale"), int | float) or not abs(scale) < float("inf"):
        raise ModelError(f"config.json: attn_scale must be a number, not {scale!r}")
    return Temperature(needed(config, "floor_scale"), scale)


def _rope(config: Config, max_position: int) -> RopeConfig:
    """null for its base is as good as a missing key."""
    theta = _THETA if config.get("rope_theta") is None else config["rope_theta"]
    return read_rope({**config, "rope_theta": theta}, max_position)


_DEFAULTS: dict[str, Any] = {
    "attention_chunk_size": 8192,
    "attn_scale": 0.1,
    "attn_temperature_tuning": True,
    "eos_token_id": 2,
    "floor_scale": 8192,
    "head_dim": 128,
    "interleave_moe_layer_step": 1,
    "intermediate_size_mlp": 16384,
    "no_rope_layer_interval": 4,
    "num_experts_per_tok": 1,
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "rms_norm_eps": 1e-5,
    "use_qk_norm": True,
}
LLAMA4 = Family(
    "Llama4ForCausalLM",
    "llama4_text",
    _describe,
    reads=words("attention_bias layer_types moe_layers no_rope_layers") | frozenset(_DEFAULTS),
    defaults=_DEFAULTS,
    not_used={"for_llm_compressor": (False,)},
    rope=_rope,
)
