"""Reads config.json. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from treeline_runtime.models.families import FAMILIES, Family
from treeline_runtime.models.model_config import ModelConfig
from treeline_runtime.models.quantization.scheme import NotServed, Scheme, read_scheme
from treeline_runtime.models.rope_config import RopeConfig
from treeline_runtime.models.settings import FULL, ModelError, flag, positive, read_object, unknown_settings

__all__ = ["ModelConfig", "ModelError", "RopeConfig", "read_config"]

MOST_LAYERS = 4096
LARGEST_SIZE = 1 << 31
"""Larger values are mistakes, and would exhaust memory before any error."""
CAUSAL, CLASSIFIER, BASE = "ForCausalLM", "ForSequenceClassification", "Model"
"""Endings of architectures: a decoder with a language-model head, a classification head, or none."""
MULTIMODAL = "ForConditionalGeneration"
"""The ending of a decoder with a language-model head and encoders."""
FOREIGN_FILES = {
    "hf_quant_config.json": "ModelOpt's quantised checkpoints are not supported ({} is there)",
    "quantize_config.json": "GPTQ's quantised checkpoints are not supported ({} is there)",
    "adapter_config.json": "this is an adapter ({} is there): serve its base model with --lora-modules NAME=PATH, or "
    "merge the adapter into the model",
}
"""Files beside config.json that change the meaning of the weights."""


def read_config(path: str | Path) -> ModelConfig:
    """Reads config.json and, if present, generation_config.json. Raises ModelError."""
    directory = Path(path)
    if not directory.is_dir():
        raise ModelError(f"{directory} is not a directory")
    config = read_object(directory / "config.json")
    for name, problem in FOREIGN_FILES.items():
        if (directory / name).exists():
            raise ModelError(problem.format(name))
    generation = directory / "generation_config.json"
    return parse_config(config, read_object(generation) if generation.is_file() else {})


def parse_config(config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """generation: generation_config.json, {} if it is missing."""
    try:
        family = _family(config)
        config = family.unnested(config)
        quantization = _quantization(config, family)
        _refuse_unknown(config, family)
        config = {**family.defaults, **config}
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        max_position = int(config["max_position_embeddings"])
        bias = "attention_bias" in family.reads and flag(config, "attention_bias")
        common = ModelConfig(
            architecture=family.architecture,
            vocab_size=int(config["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(config["intermediate_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            rms_norm_eps=positive(config, "rms_norm_eps") or 1e-6,
            max_position=max_position,
            tie_word_embeddings=flag(config, "tie_word_embeddings"),
            rope=family.rope(config, max_position),
            eos_token_ids=_eos_ids(generation) or _eos_ids(config),
            quantization=quantization,
            qkv_bias=bias,
            o_bias=bias,
        )
        if common.num_layers > MOST_LAYERS:  # families make lists of that length
            raise ModelError(f"config.json: num_hidden_layers is {common.num_layers}, more than {MOST_LAYERS}")
        model = family.describe(common, config)
        _check(model, family)
        return model
    except KeyError as error:
        raise ModelError(f"config.json lacks {error}") from error
    except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise ModelError(f"config.json: {error}") from error


def _check(model: ModelConfig, family: Family) -> None:
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
    for name in (*sizes, "head_dim", "max_position"):
        if getattr(model, name) < 1:
            raise ModelError(f"config.json: {name} must be at least 1, not {getattr(model, name)}")
        _check_size(name, getattr(model, name))
    if model.moe is not None:
        _check_size("the number of experts", model.moe.num_experts)
        _check_size("an expert's intermediate size", model.moe.intermediate_size)
        _check_size("the shared expert's intermediate size", model.moe.shared_intermediate_size)
    for encoder in (model.vision, model.audio):
        for name, size in asdict(encoder).items() if encoder is not None else ():
            if isinstance(size, int):
                _check_size(f"{name} of the encoder", size)
    if model.num_heads % model.num_kv_heads:
        raise ModelError(
            f"config.json: {model.num_heads} attention heads cannot share {model.num_kv_heads} key/value heads"
        )
    if model.quantization is not None and model.moe is not None:
        raise ModelError(f"fp8 weights are not supported for {model.architecture}, which has experts")
    for rope in filter(None, (model.rope, model.local_rope)):
        rope.check(model.head_dim)
        if rope.partial_rotary_factor != 1 and not family.partial_rotary:
            what = f"partial_rotary_factor {rope.partial_rotary_factor}"
            raise ModelError(f"{what} is not supported for {model.architecture}; only 1.0 is")


def _check_size(name: str, size: int) -> None:
    if size > LARGEST_SIZE:
        raise ModelError(f"config.json: {name} is {size:.1e}, more than {LARGEST_SIZE}")


def decoder_architecture(name: str) -> str:
    """The language model with an architecture's decoder: `Qwen3ForCausalLM` for Qwen3ForSequenceClassification and
    Qwen3Model, which differ after it (see `pooling`)."""
    for ending in (CLASSIFIER, BASE):
        if name.endswith(ending):
            return name.removesuffix(ending) + CAUSAL
    return name


def _family(config: Mapping[str, Any]) -> Family:
    names = config.get("architectures") or []
    decoders = [decoder_architecture(str(name)) for name in names]
    family = next((FAMILIES[name] for name in decoders if name in FAMILIES), None)
    kind = config.get("model_type")
    if family is None:
        what = ", ".join(map(str, names)) or f"model_type {kind!r}"
        raise ModelError(f"architecture {what} is not supported; supported: {', '.join(FAMILIES)}")
    if kind not in (None, family.model_type):
        raise ModelError(f"config.json has architecture {family.architecture}, but model_type {kind!r}: which is it?")
    return family


def _quantization(config: Mapping[str, Any], family: Family) -> Scheme | None:
    """None if nothing is quantised, or the family reads its own format."""
    settings = config.get("quantization_config")
    if family.quant_method and isinstance(settings, dict) and settings.get("quant_method") == family.quant_method:
        config = {key: value for key, value in config.items() if key != "quantization_config"}
    try:
        return read_scheme(config)
    except NotServed as error:
        raise ModelError(f"config.json: {error}") from error


def _refuse_unknown(config: Mapping[str, Any], family: Family) -> None:
    """Refuses settings that are not used here but may change what the model computes."""
    read = family.reads | {family.activation[0]}
    if "layer_types" not in read:
        if kinds := set(config.get("layer_types") or ()) - {FULL}:
            raise ModelError(f"layers of type {', '.join(sorted(map(str, kinds)))} are not supported (layer_types)")
        read |= {"layer_types"}
    if "sliding_window" not in read and config.get("use_sliding_window") is False:
        read |= {"sliding_window"}
    key, served = family.activation
    if (activation := config.get(key, served[0])) not in served:
        raise ModelError(f"activation {activation!r} is not supported; only {served[0]} is")
    if settings := unknown_settings(config, read, family.not_used):
        raise ModelError(
            f"config.json has settings that are not known here and may change the result: {', '.join(settings)}; "
            "if they have no effect on this model, remove them"
        )


def _eos_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    eos = config.get("eos_token_id")
    if eos is None:
        return ()
    return tuple(int(i) for i in eos) if isinstance(eos, list) else (int(eos),)
