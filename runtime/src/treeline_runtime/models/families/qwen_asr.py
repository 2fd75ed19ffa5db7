"""Qwen3-ASR: Qwen3 with an encoder of sound, in the form that transformers saves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from treeline_runtime.models.families.base import Config, Family
from treeline_runtime.models.families.dense import QWEN3
from treeline_runtime.models.families.qwen_vl import unnested
from treeline_runtime.models.model_config import AudioConfig, ModelConfig
from treeline_runtime.models.settings import ModelError, whole, words

_SIZES = {
    "num_mel_bins": 128,
    "encoder_layers": 24,
    "encoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "d_model": 1024,
    "n_window": 50,
    "output_dim": 3584,
    "n_window_infer": 800,
    "downsample_hidden_size": 480,
    "max_position_embeddings": 13,
}
"""Settings of the encoder with their defaults."""
_FIXED = {"activation_function": "gelu", "scale_embedding": False}
_NO_EFFECT = words(
    "activation_dropout attention_dropout dropout dtype hidden_size initializer_range intermediate_size model_type "
    "num_attention_heads num_hidden_layers torch_dtype transformers_version"
)


def _describe(common: ModelConfig, config: Config) -> ModelConfig:
    given = config["audio_config"]
    if not isinstance(given, Mapping):
        raise ModelError(f"config.json: audio_config must be an object, not {given!r}")
    known = _SIZES.keys() | _FIXED.keys() | _NO_EFFECT
    if unknown := [f"{key} = {value!r}" for key, value in given.items() if value is not None and key not in known]:
        raise ModelError(f"config.json: audio_config has settings that are not known here: {', '.join(unknown)}")
    for key, value in _FIXED.items():
        if given.get(key, value) != value:
            raise ModelError(f"{key} {given[key]!r} of audio_config is not supported")
    sizes = {key: whole({**_SIZES, **given}, key) for key in _SIZES}
    chunk, heads = 2 * sizes["n_window"], sizes["encoder_attention_heads"]
    if sizes["n_window_infer"] % chunk or -(-chunk // 8) > sizes["max_position_embeddings"]:
        raise ModelError(
            f"audio_config: n_window_infer and max_position_embeddings do not fit chunks of {chunk} frames"
        )
    if sizes["d_model"] % (2 * heads):
        raise ModelError(f"audio_config: d_model {sizes['d_model']} must be twice a multiple of the {heads} heads")
    if sizes["output_dim"] != common.hidden_size:
        raise ModelError(f"audio_config: output_dim must be the decoder's hidden_size, {common.hidden_size}")
    encoder = AudioConfig(
        depth=sizes["encoder_layers"],
        hidden_size=sizes["d_model"],
        intermediate_size=sizes["encoder_ffn_dim"],
        heads=heads,
        bins=sizes["num_mel_bins"],
        channels=sizes["downsample_hidden_size"],
        chunk=chunk,
        window=sizes["n_window_infer"],
        out_size=sizes["output_dim"],
    )
    placeholders = {"audio": whole(config, "audio_token_id")}
    return replace(QWEN3.describe(common, config), audio=encoder, placeholders=placeholders)


QWEN3_ASR = Family(
    "Qwen3ASRForConditionalGeneration",
    "qwen3_asr",
    _describe,
    reads=QWEN3.reads | words("audio_config audio_token_id text_config"),
    defaults={**QWEN3.defaults, "tie_word_embeddings": True},
    not_used={"timestamp_token_id": (151705,), "token_classification_bias": (False,)},
    unnested=unnested,
)
