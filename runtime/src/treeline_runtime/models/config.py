"""What a checkpoint's config.json says, in our words. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


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
        generation = directory / "generation_config.json"
        eos = _eos_ids(config)
        if generation.is_file():
            eos = _eos_ids(_read_json(generation)) or eos
        return cls._parse(config, eos)

    @classmethod
    def _parse(cls, config: Mapping[str, Any], eos: tuple[int, ...]) -> ModelConfig:
        architecture = _architecture(config)
        if config.get("quantization_config"):
            method = config["quantization_config"].get("quant_method", "unknown")
            raise ModelError(
                f"quantised checkpoints are not supported (config.json has quant_method {method!r})"
            )
        if config.get("use_sliding_window"):
            raise ModelError("sliding-window attention is not supported (config.json has use_sliding_window)")
        activation = config.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise ModelError(f"activation {activation!r} is not supported; only silu is")
        try:
            heads = int(config["num_attention_heads"])
            hidden = int(config["hidden_size"])
            max_position = int(config["max_position_embeddings"])
            attention_bias = bool(config.get("attention_bias", False))
            qwen2 = architecture == "Qwen2ForCausalLM"
            default_head = 128 if architecture == "Qwen3ForCausalLM" else hidden // heads
            return cls(
                architecture=architecture,
                vocab_size=int(config["vocab_size"]),
                hidden_size=hidden,
                intermediate_size=int(config["intermediate_size"]),
                num_layers=int(config["num_hidden_layers"]),
                num_heads=heads,
                num_kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or default_head),
                rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
                max_position=max_position,
                tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
                qkv_bias=qwen2 or attention_bias,
                o_bias=not qwen2 and attention_bias,
                mlp_bias=architecture == "LlamaForCausalLM" and bool(config.get("mlp_bias", False)),
                qk_norm=architecture == "Qwen3ForCausalLM",
                rope=_rope(config, max_position),
                eos_token_ids=eos,
            )
        except KeyError as error:
            raise ModelError(f"config.json lacks {error}") from error
        except (TypeError, ValueError) as error:
            raise ModelError(f"config.json: {error}") from error


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


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return str(name)
    what = ", ".join(map(str, names)) or f"model_type {config.get('model_type')!r}"
    raise ModelError(f"architecture {what} is not supported; supported: {', '.join(ARCHITECTURES)}")


def _eos_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    eos = config.get("eos_token_id")
    if eos is None:
        return ()
    return tuple(int(i) for i in eos) if isinstance(eos, list) else (int(eos),)


def _rope(config: Mapping[str, Any], max_position: int) -> RopeConfig:
    """Either generation of keys: rope_parameters (with everything inside), or rope_theta beside rope_scaling."""
    values: dict[str, Any] = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ModelError(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    partial = values.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ModelError(f"partial_rotary_factor {partial} is not supported; only 1.0 is")
    theta = values.get("rope_theta", config.get("rope_theta"))
    original = config.get("original_max_position_embeddings", values.get("original_max_position_embeddings"))
    original = int(original or max_position)
    factor = values.get("factor")
    if kind == "yarn" and factor is None:
        factor = max_position / original
    if kind != "default" and factor is None:
        raise ModelError(f"rope type {kind!r} needs a factor")
    return RopeConfig(
        type=kind,
        theta=float(10000.0 if theta is None else theta),
        factor=float(factor or 1.0),
        original_max_position=original,
        low_freq_factor=float(values.get("low_freq_factor", 1.0)),
        high_freq_factor=float(values.get("high_freq_factor", 4.0)),
        beta_fast=float(values.get("beta_fast") or 32.0),
        beta_slow=float(values.get("beta_slow") or 1.0),
        attention_factor=values.get("attention_factor"),
        mscale=values.get("mscale"),
        mscale_all_dim=values.get("mscale_all_dim"),
        truncate=bool(values.get("truncate", True)),
    )
