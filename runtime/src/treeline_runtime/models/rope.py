"""Rotary position embedding: tables of cosines and sines by position.

An angle depends on the position alone, so a cached key is valid for all requests that share its prefix. Two kinds of
scaling depend on the sequence's length, which grows while keys are kept. As in vLLM, they are computed for the longest
sequence that is served.

- The base of `dynamic` scaling is that of the longest sequence. A context within the trained length, the default, is
  not scaled at all.
- `longrope` takes its long factors where the context is longer than `original_max_position`, else the short ones.
  transformers takes the short ones for as long as a sequence is short: to have them, serve with a short
  `--context-length`.
"""

from __future__ import annotations

import math

import torch

from treeline_runtime.models.config import RopeConfig


def rope_tables(
    rope: RopeConfig, head_dim: int, max_position: int, length: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """→ cos, sin, each (length, rotated elements of a head), for `rotate`."""
    positions = torch.arange(length, dtype=torch.float32)
    dim = rope.dim(head_dim)
    frequencies, scale = _frequencies(rope, dim, max_position, length)
    angles = positions[:, None] * frequencies
    cos, sin = angles.cos() * scale, angles.sin() * scale
    # rotate() multiplies sin with the swapped halves: the sign of the rotation is folded in here
    return (
        torch.cat((cos, cos), dim=-1).to(device=device, dtype=dtype),
        torch.cat((-sin, sin), dim=-1).to(device=device, dtype=dtype),
    )


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x (tokens, heads, head_dim); cos, sin (tokens, 1, rotated elements) as looked up in the tables."""
    dim = cos.shape[-1]
    if dim < x.shape[-1]:
        return torch.cat((rotate(x[..., :dim], cos, sin), x[..., dim:]), dim=-1)
    return (x * cos).addcmul_(x.roll(dim // 2, dims=-1), sin)


def _plain(theta: float, dim: int) -> torch.Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def _frequencies(rope: RopeConfig, dim: int, trained: int, length: int) -> tuple[torch.Tensor, float]:
    """→ (dim / 2 inverse frequencies, factor on cos and sin)."""
    plain = _plain(rope.theta, dim)
    if rope.type == "linear":
        return plain / rope.factor, 1.0
    if rope.type == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.type == "yarn":
        return _yarn(rope, dim), _yarn_scale(rope)
    if rope.type == "dynamic":
        stretch = rope.factor * max(length, trained) / trained - (rope.factor - 1)
        return _plain(rope.theta * stretch ** (dim / (dim - 2)), dim), 1.0
    if rope.type == "longrope":
        return _longrope(rope, dim, length), _longrope_scale(rope)
    return plain, 1.0


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Stretches long waves, keeps short ones, blends those between."""
    wavelength = 2 * math.pi / plain
    turns = rope.original_max_position / wavelength
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return torch.where(
        turns < rope.low_freq_factor,
        plain / rope.factor,
        torch.where(turns > rope.high_freq_factor, plain, (1 - blend) * plain / rope.factor + blend * plain),
    )


def _yarn(rope: RopeConfig, dim: int) -> torch.Tensor:
    """Keeps frequencies that turn often in the trained length, stretches the others, with a ramp between."""

    def dim_of(turns: float) -> float:
        return dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    stretched = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    plain = _plain(rope.theta, dim)
    return plain / rope.factor * stretched + plain * (1 - stretched)


def _yarn_scale(rope: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def _longrope(rope: RopeConfig, dim: int, length: int) -> torch.Tensor:
    """https://arxiv.org/abs/2402.13753: a divisor for each frequency."""
    factors = rope.long_factor if length > rope.original_max_position else rope.short_factor
    return _plain(rope.theta, dim) / torch.tensor(factors, dtype=torch.float32)


def _longrope_scale(rope: RopeConfig) -> float:
    """For both sets of factors: longer contexts spread attention over more tokens."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position))
