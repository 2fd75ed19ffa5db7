"""Gemma 3 and InternVL: a language model, and an encoder of pictures of one size.

The language model of InternVL 3 is Qwen2, that of 3.5 is Qwen3 or Qwen3-MoE. Its settings are in `text_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from treeline_runtime.models.families.base import Config, Family
from treeline_runtime.models.families.dense import QWEN2, QWEN3
from treeline_runtime.models.families.gemma import GEMMA3
from treeline_runtime.models.families.moe import QWEN3_MOE
from treeline_runtime.models.families.qwen_vl import unnested
from treeline_runtime.models.model_config import ModelConfig, TowerConfig
from treeline_runtime.models.settings import ModelError, flag, needed, unknown_settings, whole, words

_SIZES = {
    "hidden_size": 768,
    "image_size": 224,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-6,
    "num_attention_heads": 12,
    "num_channels": 3,
    "num_hidden_layers": 12,
    "patch_size": 16,
}
"""Settings of SigLIP with their defaults."""
_NO_EFFECT = words("dropout layer_scale_init_value projection_dropout use_mask_token vision_use_head")


def _tower(common: ModelConfig, config: Config, defaults: Config, fixed: Config) -> tuple[TowerConfig, Config]:
    """Returns the settings that both families share, and vision_config with defaults. fixed: settings that may have one
    value only."""
    given = config["vision_config"]
    if not isinstance(given, Mapping):
        raise ModelError(f"config.json: vision_config must be an object, not {given!r}")
    settings: dict[str, Any] = {**defaults, **fixed, **{k: v for k, v in given.items() if v is not None}}
    if unknown := unknown_settings(given, _NO_EFFECT | defaults.keys() | fixed.keys(), {}):
        raise ModelError(f"config.json: vision_config has settings that are not known here: {', '.join(unknown)}")
    for key, value in fixed.items():
        if settings[key] != value:
            raise ModelError(f"{key} {settings[key]!r} of vision_config is not supported; only {value!r} is")
    for key in ("image_size", "patch_size"):  # of height and width
        if isinstance(settings[key], list) and len(set(settings[key])) == 1:
            settings[key] = settings[key][0]
    sizes = {key: whole(settings, key) for key in _SIZES if key != "layer_norm_eps"}
    if sizes["hidden_size"] % sizes["num_attention_heads"]:
        raise ModelError("vision_config: hidden_size must be a multiple of num_attention_heads")
    tower = TowerConfig(
        depth=sizes["num_hidden_layers"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        heads=sizes["num_attention_heads"],
        channels=sizes["num_channels"],
        side=sizes["image_size"],
        patch=sizes["patch_size"],
        merge=1,
        out_size=common.hidden_size,
        eps=needed(settings, "layer_norm_eps"),
        means=True,
    )
    return tower, settings


def _merged(tower: TowerConfig, merge: int, count: int, key: str) -> TowerConfig:
    """With merge x merge patches a token. `key` of config.json says that a picture has `count` tokens."""
    made = replace(tower, merge=merge)
    if merge < 1 or tower.patches_of_side % merge or made.count != count:
        raise ModelError(f"config.json: {key} {count} does not fit {tower.patches_of_side} patches a side")
    return made


def _gemma3(common: ModelConfig, config: Config) -> ModelConfig:
    tower, _ = _tower(common, config, _SIZES, {"hidden_act": "gelu_pytorch_tanh"})
    count = whole(config, "mm_tokens_per_image")
    merge = tower.patches_of_side // round(count**0.5)
    return replace(
        GEMMA3.describe(common, config),
        vision=_merged(tower, merge, count, "mm_tokens_per_image"),
        both_ways=True,
        placeholders={"image": whole(config, "image_token_index")},
    )


_TEXTS = {"qwen2": QWEN2, "qwen3": QWEN3, "qwen3_moe": QWEN3_MOE}


def _text(config: Config) -> Family:
    kind = (config.get("text_config") or {}).get("model_type", "qwen2")
    if kind not in _TEXTS:
        raise ModelError(f"text_config: model_type {kind!r} is not supported; supported: {', '.join(_TEXTS)}")
    return _TEXTS[kind]


def _unnested(config: Config) -> Config:
    made = unnested(config)
    return {**_text(config).defaults, **made}


def _internvl(common: ModelConfig, config: Config) -> ModelConfig:
    defaults = {**_SIZES, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "image_size": 448}
    defaults |= {"intermediate_size": 4096, "patch_size": 14}
    own = {"attention_bias": False, "use_qk_norm": False, "norm_type": "layer_norm"}
    fixed = {"hidden_act": "gelu", "use_mean_pooling": True, "use_absolute_position_embeddings": True}
    tower, settings = _tower(common, config, defaults | own, fixed)
    if settings["norm_type"] not in ("layer_norm", "rms_norm"):
        raise ModelError(f"norm_type {settings['norm_type']!r} of vision_config is not supported")
    ratio = needed(config, "downsample_ratio")
    return replace(
        _text(config).describe(common, config),
        vision=replace(
            _merged(tower, round(1 / ratio), whole(config, "image_seq_length"), "image_seq_length"),
            means=False,
            qkv_bias=flag(settings, "attention_bias"),
            qk_norm=flag(settings, "use_qk_norm"),
            rms=settings["norm_type"] == "rms_norm",
        ),
        placeholders={"image": whole(config, "image_token_id")},
    )


GEMMA3_VL = Family(
    "Gemma3ForConditionalGeneration",
    "gemma3",
    _gemma3,
    reads=GEMMA3.reads
    | words("boi_token_index eoi_token_index image_token_index mm_tokens_per_image text_config vision_config"),
    defaults={
        **GEMMA3.defaults,
        "image_token_index": 262144,
        "max_position_embeddings": 131072,
        "mm_tokens_per_image": 256,
        "num_attention_heads": 8,
        "vocab_size": 262208,
    },
    not_used=GEMMA3.not_used,
    activation=GEMMA3.activation,
    rope=GEMMA3.rope,
    unnested=lambda config: unnested({"tie_word_embeddings": True, **config}),
)
INTERNVL = Family(
    "InternVLForConditionalGeneration",
    "internvl",
    _internvl,
    reads=QWEN2.reads
    | QWEN3.reads
    | QWEN3_MOE.reads
    | words("downsample_ratio image_seq_length image_token_id text_config vision_config"),
    defaults={"downsample_ratio": 0.5, "image_seq_length": 256, "image_token_id": 151667},
    not_used={
        "projector_hidden_act": ("gelu",),
        "vision_feature_layer": (-1,),
        "vision_feature_select_strategy": ("default",),
    },
    unnested=_unnested,
)
