"""The interface of a model family.

A family maps config.json to a `ModelConfig`: `config.py` reads what all share, `describe` the rest. `decoder.py`
computes all of them. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from treeline_runtime.models.model_config import ModelConfig
from treeline_runtime.models.rope_config import RopeConfig, read_rope

Config = Mapping[str, Any]
"""config.json with the family's defaults."""


@dataclass(frozen=True)
class Family:
    """An architecture of transformers."""

    architecture: str
    model_type: str
    describe: Callable[[ModelConfig, Config], ModelConfig]
    """Completes the config that every family starts from: a Llama without biases, or with those that `attention_bias`
    names if it is among `reads`. Raises ModelError, or an error of a value's conversion."""
    reads: frozenset[str] = frozenset()
    """Keys used by `describe` and `rope`, besides those read for all."""
    defaults: Config = field(default_factory=dict)
    not_used: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Further keys → values without effect in this family."""
    activation: tuple[str, tuple[str, ...]] = ("hidden_act", ("silu", "swish"))
    """The key of the activation, and the supported values."""
    quant_method: str | None = None
    """The quantisation of supported checkpoints; None: only unquantised ones."""
    partial_rotary: bool = False
    """Whether transformers rotates part of a head if config.json says so."""
    rope: Callable[[Config, int], RopeConfig] = read_rope
    """config.json, max_position → the rope of layers without a window, or of all layers."""
    unnested: Callable[[Config], Config] = lambda config: config
    """config.json → the same with the decoder's settings at the top."""
