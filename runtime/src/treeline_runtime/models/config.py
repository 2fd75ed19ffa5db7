"""What a checkpoint's config.json says, in our words. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treeline_runtime.models.keys import unknown_rope_settings, unknown_settings
from treeline_runtime.models.quantization.scheme import NotServed, Scheme, read_scheme


class ModelError(Exception):
    """The checkpoint cannot be served; the message says which file or setting, and what would do."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. Fields beyond `theta` belong to some types only."""

    type: str = "default"
    """default, linear, dynamic, llama3 or yarn."""
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
ROPE_NEEDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
MODEL_TYPES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
"""Architecture → its model_type."""
CAUSAL, CLASSIFIER, BASE = "ForCausalLM", "ForSequenceClassification", "Model"
"""Endings of architectures: a decoder with a language-model head, with a classification head, and with none."""
FOREIGN_FILES = {
    "hf_quant_config.json": "ModelOpt's quantised checkpoints are not supported ({} is there)",
    "quantize_config.json": "GPTQ's quantised checkpoints are not supported ({} is there)",
    "adapter_config.json": "adapters are not supported ({} is there): merge the adapter into the model",
}
"""Files beside config.json that change what the weights mean."""


@dataclass(frozen=True)
class ModelConfig:
    """A dense decoder. Sizes in elements."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    eos_token_ids: tuple[int, ...]
    quantization: Scheme | None

    @property
    def longest_context(self) -> int:
        """Positions that the rope scaling makes usable."""
        if self.rope.type in ("linear", "dynamic"):
            return max(self.max_position, int(self.max_position * self.rope.factor))
        if self.rope.type == "yarn":
            return max(self.max_position, int(self.rope.original_max_position * self.rope.factor))
        return self.max_position

    @classmethod
    def from_dir(cls, path: str | Path) -> ModelConfig:
        """Read config.json and, if there, generation_config.json. Raises ModelError."""
        directory = Path(path)
        if not directory.is_dir():
            raise ModelError(f"{directory} is not a directory")
        config = _read_json(directory / "config.json")
        for name, problem in FOREIGN_FILES.items():
            if (directory / name).exists():
                raise ModelError(problem.format(name))
        generation = directory / "generation_config.json"
        eos = _eos_ids(config)
        if generation.is_file():
            eos = _eos_ids(_read_json(generation)) or eos
        return cls._parse(config, eos)

    @classmethod
    def _parse(cls, config: Mapping[str, Any], eos: tuple[int, ...]) -> ModelConfig:
        architecture = _architecture(config)
        quantization = _quantization(config)
        _refuse_unknown(config)
        try:
            heads = int(config["num_attention_heads"])
            hidden = int(config["hidden_size"])
            max_position = int(config["max_position_embeddings"])
            attention_bias = _flag(config, "attention_bias")
            qwen2 = architecture == "Qwen2ForCausalLM"
            llama = architecture == "LlamaForCausalLM"
            default_head = 128 if architecture == "Qwen3ForCausalLM" else hidden // heads
            model = cls(
                architecture=architecture,
                vocab_size=int(config["vocab_size"]),
                hidden_size=hidden,
                intermediate_size=int(config["intermediate_size"]),
                num_layers=int(config["num_hidden_layers"]),
                num_heads=heads,
                # what the classes of transformers take for a missing key; null means "as many as heads"
                num_kv_heads=int(config.get("num_key_value_heads", heads if llama else 32) or heads),
                head_dim=int(config.get("head_dim") or default_head),
                rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
                max_position=max_position,
                tie_word_embeddings=_flag(config, "tie_word_embeddings"),
                qkv_bias=qwen2 or attention_bias,
                o_bias=not qwen2 and attention_bias,
                mlp_bias=llama and _flag(config, "mlp_bias"),
                qk_norm=architecture == "Qwen3ForCausalLM",
                rope=_rope(config, max_position),
                eos_token_ids=eos,
                quantization=quantization,
            )
        except KeyError as error:
            raise ModelError(f"config.json lacks {error}") from error
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise ModelError(f"config.json: {error}") from error
        model._check_sizes()
        return model

    def _check_sizes(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        for name in (*sizes, "head_dim", "max_position"):
            if getattr(self, name) < 1:
                raise ModelError(f"config.json: {name} must be at least 1, not {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"config.json: {self.num_heads} attention heads cannot share {self.num_kv_heads} key/value heads"
            )
        if self.head_dim % 2:
            raise ModelError(f"config.json: rotary embedding needs an even head_dim, not {self.head_dim}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: a model directory has the Hugging Face layout") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path} is not a JSON object")
    return data


def decoder_architecture(name: str) -> str:
    """The language model whose decoder an architecture has: `Qwen3ForCausalLM` for Qwen3ForSequenceClassification and
    Qwen3Model, which differ in what comes behind it (see `pooling`)."""
    for ending in (CLASSIFIER, BASE):
        if name.endswith(ending):
            return name.removesuffix(ending) + CAUSAL
    return name


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    decoders = [decoder_architecture(str(name)) for name in names]
    name = next((name for name in decoders if name in MODEL_TYPES), None)
    kind = config.get("model_type")
    if name is None:
        what = ", ".join(map(str, names)) or f"model_type {kind!r}"
        raise ModelError(f"architecture {what} is not supported; supported: {', '.join(MODEL_TYPES)}")
    if kind not in (None, MODEL_TYPES[name]):
        raise ModelError(f"config.json has architecture {name}, but model_type {kind!r}: which is it?")
    return name


def _quantization(config: Mapping[str, Any]) -> Scheme | None:
    try:
        return read_scheme(config)
    except NotServed as error:
        raise ModelError(f"config.json: {error}") from error


def _refuse_unknown(config: Mapping[str, Any]) -> None:
    """Settings that are not acted on here, but change what the model computes, or may."""
    if config.get("use_sliding_window"):
        raise ModelError("sliding-window attention is not supported (config.json has use_sliding_window)")
    if config.get("sliding_window") is not None and config.get("use_sliding_window") is not False:
        raise ModelError("sliding-window attention is not supported (config.json has sliding_window)")
    if kinds := set(config.get("layer_types") or ()) - {"full_attention"}:
        raise ModelError(f"layers of type {', '.join(sorted(map(str, kinds)))} are not supported (layer_types)")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"activation {activation!r} is not supported; only silu is")
    if settings := unknown_settings(config):
        raise ModelError(
            f"config.json has settings that are not known here and may change the result: {', '.join(settings)}; "
            "if they have no effect on this model, remove them"
        )


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value not in (None, True, False):
        raise ValueError(f"{key} must be true or false, not {value!r}")
    return bool(value)


def _eos_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    eos = config.get("eos_token_id")
    if eos is None and "eos_token_id" not in config and config.get("model_type") == "llama":
        return (2,)  # what transformers takes for a missing key
    if eos is None:
        return ()
    return tuple(int(i) for i in eos) if isinstance(eos, list) else (int(eos),)


def _rope(config: Mapping[str, Any], max_position: int) -> RopeConfig:
    """Either generation of keys: rope_parameters (with everything inside), or rope_theta beside rope_scaling.

    Where both are present, rope_scaling replaces rope_parameters as a whole: so does transformers.
    """
    values: dict[str, Any] = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    if unknown := unknown_rope_settings(values):
        raise ModelError(f"rope settings that are not supported: {', '.join(unknown)}")
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ModelError(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    partial = values.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ModelError(f"partial_rotary_factor {partial} is not supported; only 1.0 is")
    theta = values.get("rope_theta", config.get("rope_theta"))
    original = config.get("original_max_position_embeddings", values.get("original_max_position_embeddings"))
    original = int(original or max_position)
    if kind == "yarn" and values.get("factor") is None:
        values["factor"] = max_position / original
    for key in ROPE_NEEDS.get(kind, ()):
        if values.get(key) is None:
            raise ModelError(f"rope type {kind!r} needs a {key}")
    return RopeConfig(
        type=kind,
        theta=float(10000.0 if theta is None else theta),
        factor=float(values.get("factor") or 1.0),
        original_max_position=original,
        low_freq_factor=float(values.get("low_freq_factor") or 1.0),
        high_freq_factor=float(values.get("high_freq_factor") or 4.0),
        beta_fast=float(values.get("beta_fast") or 32.0),
        beta_slow=float(values.get("beta_slow") or 1.0),
        attention_factor=values.get("attention_factor"),
        mscale=values.get("mscale"),
        mscale_all_dim=values.get("mscale_all_dim"),
        truncate=bool(values.get("truncate", True)),
    )
