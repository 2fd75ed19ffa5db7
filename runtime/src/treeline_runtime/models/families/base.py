"""What a family of models is to the rest: the shape that its modules fill in.

A family maps its config.json to a `ModelConfig`: `config.py` reads what all have alike, `describe` says the rest. What
is computed is in `decoder.py`, which all share. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from treeline_runtime.models.model_config import ModelConfig
from treeline_runtime.models.rope_config import RopeConfig, read_rope

Config = Mapping[str, Any]
"""config.json, with the family's defaults for what is missing there."""


@dataclass(frozen=True)
class Family:
    """One architecture of transformers."""

    architecture: str
    model_type: str
    describe: Callable[[ModelConfig, Config], ModelConfig]
    """From what is read of every config.json (a Llama without biases) to this model. Raises ModelError or what the
    conversion of a value raises."""
    reads: frozenset[str] = frozenset()
    """Keys that `describe` and `rope` act on, besides those that are read for all."""
    defaults: Config = field(default_factory=dict)
    """What the class of transformers takes for a missing key."""
    not_used: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Further keys → their values that change nothing in this family."""
    activation: tuple[str, tuple[str, ...]] = ("hidden_act", ("silu", "swish"))
    """The key that says it, and the values that are served."""
    quant_method: str | None = None
    """Of quantised checkpoints that are served; None: none are."""
    partial_rotary: bool = False
    """Whether transformers rotates a part of a head if config.json says so."""
    rope: Callable[[Config, int], RopeConfig] = read_rope
    """config.json, max_position → the rope of layers without a window, or of all."""
