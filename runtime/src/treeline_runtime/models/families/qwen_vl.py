"""Qwen2.5-VL, Qwen3-VL and Qwen3-VL-MoE: Qwen2, Qwen3 and Qwen3-MoE with an encoder of images and videos, and positions
of three axes.

config.json has the decoder's settings in `text_config`; older ones of Qwen2.5-VL have them beside `vision_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from treeline_runtime.models.families.base import Config, Family
from treeline_runtime.models.families.dense import QWEN2
from treeline_runtime.models.families.moe import QWEN, qwen_moe
from treeline_runtime.models.model_config import ModelConfig, MRopeConfig, VisionConfig
from treeline_runtime.models.rope_config import RopeConfig, parse_rope
from treeline_runtime.models.settings import ModelError, flag, needed, whole, words

_READS = "image_token_id text_config video_token_id vision_config vision_end_token_id vision_start_token_id"
_IDS = {"image_token_id": 151655, "video_token_id": 151656}
_SIZES = words(
    "depth hidden_size in_channels intermediate_size num_heads out_hidden_size patch_size spatial_merge_size "
    "temporal_patch_size"
)
_ENCODER = _SIZES | words(
    "hidden_act rope_parameters "
    # the same once more, or without effect on what is computed
    "dtype in_chans initializer_range model_type spatial_patch_size torch_dtype transformers_version"
)


def unnested(config: Config) -> Config:
    """The decoder's settings among those of the whole. Raises ModelError."""
    text = config.get("text_config") or {}
    if not isinstance(text, Mapping):
        raise ModelError(f"config.json: text_config must be an object, not {text!r}")
    inner = {key: value for key, value in text.items() if key not in ("architectures", "model_type")}
    # it may stand in both places, and versions of transformers differ in which they read
    tied = flag(config, "tie_word_embeddings") or flag(inner, "tie_word_embeddings")
    return {**config, **inner, "tie_word_embeddings": tied}


def _rope_settings(config: Config) -> dict[str, Any]:
    return dict(config.get("rope_scaling") or config.get("rope_parameters") or {})


def _rope(config: Config, max_position: int) -> RopeConfig:
    values = _rope_settings(config)
    for key in ("mrope_section", "mrope_interleaved"):
        values.pop(key, None)
    for key in ("type", "rope_type"):
        if values.get(key) == "mrope":  # an old name
            values[key] = "default"
    return parse_rope(values, config, max_position)


def _sections(common: ModelConfig, config: Config, default: list[int], *, interleaved: bool) -> list[int]:
    """How many of a head's frequencies turn with the frame, the row and the column."""
    settings = _rope_settings(config)
    if settings.get("mrope_interleaved") not in (None, interleaved):
        raise ModelError(f"config.json: mrope_interleaved must be {str(interleaved).lower()} for this architecture")
    sections = settings.get("mrope_section", default)
    if not isinstance(sections, list) or [type(size) for size in sections] != [int] * 3 or min(sections) < 0:
        raise ModelError(f"config.json: mrope_section must be three whole numbers, not {sections!r}")
    if sum(sections) != common.head_dim // 2:
        raise ModelError(f"config.json: mrope_section {sections} must add up to half of head_dim {common.head_dim}")
    return sections


def _encoder(common: ModelConfig, config: Config, defaults: Config, reads: str) -> tuple[VisionConfig, Config]:
    """What the encoders of all have in common, and vision_config with defaults."""
    given = config["vision_config"]
    if not isinstance(given, Mapping):
        raise ModelError(f"config.json: vision_config must be an object, not {given!r}")
    settings = {"in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2, **defaults, **given}
    known = _ENCODER | words(reads)
    if unknown := [f"{key} = {value!r}" for key, value in settings.items() if value is not None and key not in known]:
        raise ModelError(f"config.json: vision_config has settings that are not known here: {', '.join(unknown)}")
    if settings["hidden_act"] != defaults["hidden_act"]:
        raise ModelError(f"activation {settings['hidden_act']!r} of vision_config is not supported")
    sizes = {key: whole(settings, key) for key in _SIZES}
    hidden, heads = sizes["hidden_size"], sizes["num_heads"]
    if hidden % (4 * heads):
        raise ModelError(f"vision_config: hidden_size {hidden} must be four times a multiple of num_heads {heads}")
    if sizes["out_hidden_size"] != common.hidden_size:
        raise ModelError(f"vision_config: out_hidden_size must be the decoder's hidden_size, {common.hidden_size}")
    encoder = VisionConfig(
        depth=sizes["depth"],
        hidden_size=hidden,
        intermediate_size=sizes["intermediate_size"],
        heads=heads,
        channels=sizes["in_channels"],
        patch=sizes["patch_size"],
        frames=sizes["temporal_patch_size"],
        merge=sizes["spatial_merge_size"],
        out_size=sizes["out_hidden_size"],
        rope_theta=needed({"rope_theta": 10000.0, **(settings.get("rope_parameters") or {})}, "rope_theta"),
        gated=False,
    )
    return encoder, settings


def _placeholders(config: Config) -> dict[str, int]:
    return {"image": whole(config, "image_token_id"), "video": whole(config, "video_token_id")}


def _layers(settings: Config, key: str, depth: int) -> tuple[int, ...]:
    layers = settings[key]
    is_list = isinstance(layers, list) and all(type(layer) is int and 0 <= layer < depth for layer in layers)
    if not is_list or layers != sorted(set(layers)):
        raise ModelError(f"vision_config: {key} must be layers' numbers below {depth}, in order, not {layers!r}")
    return tuple(layers)


def _qwen2_5(common: ModelConfig, config: Config) -> ModelConfig:
    defaults = {"hidden_act": "silu", "patch_size": 14, "tokens_per_second": 4, "window_size": 112}
    reads = "fullatt_block_indexes tokens_per_second window_size"
    encoder, settings = _encoder(common, config, defaults, reads)
    window = whole(settings, "window_size") // encoder.merge // encoder.patch
    if window < 1:
        raise ModelError(f"vision_config: window_size {settings['window_size']} is less than a token's side")
    full = frozenset(_layers(settings, "fullatt_block_indexes", encoder.depth))
    frame, row, column = _sections(common, config, [16, 24, 24], interleaved=False)
    return replace(
        QWEN2.describe(common, config),
        placeholders=_placeholders(config),
        vision=replace(encoder, gated=True, window=window, full=full),
        mrope=MRopeConfig(
            (0,) * frame + (1,) * row + (2,) * column, encoder.merge, whole(settings, "tokens_per_second")
        ),
    )


def _qwen3(common: ModelConfig, config: Config) -> ModelConfig:
    defaults = {"hidden_act": "gelu_pytorch_tanh", "patch_size": 16}
    encoder, settings = _encoder(common, config, defaults, "deepstack_visual_indexes num_position_embeddings")
    positions = whole(settings, "num_position_embeddings")
    side = round(positions**0.5)
    if side * side != positions:
        raise ModelError(f"vision_config: num_position_embeddings must be a square, not {positions}")
    deepstack = _layers(settings, "deepstack_visual_indexes", encoder.depth)
    if len(deepstack) > common.num_layers:
        raise ModelError(f"vision_config: deepstack_visual_indexes has more than the {common.num_layers} layers")
    _, row, column = _sections(common, config, [24, 20, 20], interleaved=True)
    half = common.head_dim // 2
    # every third frequency from the second on turns with the row, and from the third on with the column
    axes = tuple(1 if i % 3 == 1 and i < 3 * row else 2 if i % 3 == 2 and i < 3 * column else 0 for i in range(half))
    return replace(
        common,
        qk_norm=True,
        placeholders=_placeholders(config),
        vision=replace(encoder, learned_side=side, deepstack=deepstack),
        mrope=MRopeConfig(axes, encoder.merge),
    )


def _qwen3_moe(common: ModelConfig, config: Config) -> ModelConfig:
    experts = qwen_moe(common, config, 0, "num_experts", "num_local_experts")
    return replace(_qwen3(common, config), moe=replace(experts, normalise=True))


QWEN2_5_VL = Family(
    "Qwen2_5_VLForConditionalGeneration",
    "qwen2_5_vl",
    _qwen2_5,
    reads=QWEN2.reads | words(_READS) | words("vision_token_id"),
    defaults={
        **QWEN2.defaults,
        **_IDS,
        "eos_token_id": 151645,
        "max_window_layers": 80,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
    not_used=QWEN2.not_used,
    rope=_rope,
    unnested=unnested,
)
QWEN3_VL = Family(
    "Qwen3VLForConditionalGeneration",
    "qwen3_vl",
    _qwen3,
    reads=words(f"attention_bias {_READS}"),
    defaults={"head_dim": 128, "num_key_value_heads": 32, "rope_theta": 5e5, **_IDS},
    rope=_rope,
    unnested=unnested,
)
QWEN3_VL_MOE = Family(
    "Qwen3VLMoeForConditionalGeneration",
    "qwen3_vl_moe",
    _qwen3_moe,
    reads=QWEN3_VL.reads
    | (QWEN - words("norm_topk_prob sliding_window use_sliding_window"))
    | words("num_local_experts"),
    defaults={"num_experts_per_tok": 4, "num_key_value_heads": 16, "rope_theta": 5e5, **_IDS},
    not_used={"norm_topk_prob": (True,)},
    rope=_rope,
    unnested=unnested,
)
