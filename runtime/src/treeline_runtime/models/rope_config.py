"""Reads rope settings of config.json. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from treeline_runtime.models.settings import ModelError, positive, unknown_rope_settings

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
ROPE_NEEDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
"""Settings that have the default of `RopeConfig` where they are missing or 0."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. Fields after `partial_rotary_factor` belong to some types only."""

    type: str = "default"
    """One of ROPE_TYPES."""
    theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    """The share of a head that is rotated, from its first element."""
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
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    """A divisor per frequency: longrope's, for contexts up to original_max_position and beyond."""

    def dim(self, head_dim: int) -> int:
        return int(head_dim * self.partial_rotary_factor)

    def check(self, head_dim: int) -> None:
        """Raises ModelError if a head cannot be rotated this way."""
        dim = self.dim(head_dim)
        if not 0 < self.theta < float("inf"):
            raise ModelError(f"config.json: rope_theta must be above 0, not {self.theta}")
        if head_dim % 2:
            raise ModelError(f"config.json: rotary embedding needs an even head_dim, not {head_dim}")
        if not 2 <= dim <= head_dim or dim % 2:
            raise ModelError(
                f"config.json: partial_rotary_factor {self.partial_rotary_factor} of head_dim {head_dim} must be an "
                f"even number of its elements, not {dim}"
            )
        if self.type != "longrope":
            return
        if self.original_max_position < 2:
            raise ModelError("config.json: longrope needs an original_max_position_embeddings of at least 2")
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            if len(factors) != dim // 2 or not all(factor > 0 for factor in factors):
                raise ModelError(f"config.json: {name} must be {dim // 2} numbers above 0, one for each frequency")


def read_rope(config: Mapping[str, Any], max_position: int) -> RopeConfig:
    """Reads either form: rope_parameters (with everything inside), or rope_theta and rope_scaling.

    If both are present, rope_scaling replaces rope_parameters, as in transformers.
    """
    return parse_rope(config.get("rope_scaling") or config.get("rope_parameters") or {}, config, max_position)


def parse_rope(given: Mapping[str, Any], config: Mapping[str, Any], max_position: int) -> RopeConfig:
    """`given`: the settings; missing ones come from the rest of config.json."""
    values = dict(given)
    if unknown := unknown_rope_settings(values):
        raise ModelError(f"rope settings that are not supported: {', '.join(unknown)}")
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ModelError(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    partial = values.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    theta = values.get("rope_theta", config.get("rope_theta"))
    original = config.get("original_max_position_embeddings", values.get("original_max_position_embeddings"))
    original = int(original or max_position)
    if kind in ("yarn", "longrope") and values.get("factor") is None:
        values["factor"] = max_position / original
    for key in ROPE_NEEDS.get(kind, ()):
        if values.get(key) is None:
            raise ModelError(f"rope type {kind!r} needs a {key}")
    return RopeConfig(
        type=kind,
        theta=float(10000.0 if theta is None else theta),
        partial_rotary_factor=1.0 if partial is None else float(partial),
        original_max_position=original,
        attention_factor=positive(values, "attention_factor") if kind == "longrope" else values.get("attention_factor"),
        mscale=values.get("mscale"),
        mscale_all_dim=values.get("mscale_all_dim"),
        truncate=bool(values.get("truncate", True)),
        short_factor=tuple(map(float, values.get("short_factor") or ())),
        long_factor=tuple(map(float, values.get("long_factor") or ())),
        **{key: float(values[key]) for key in _NUMBERS if values.get(key)},
    )
