"""The encoder of Qwen3-ASR: a transformer over a spectrogram, which convolutions make eight times shorter.

The spectrogram is cut into chunks of a second; each is convolved alone, and positions count from its beginning. Tokens
of eight chunks see each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from treeline_runtime.messages import MediaItem
from treeline_runtime.models.model_config import AudioConfig
from treeline_runtime.models.vision import Norm, Projection
from treeline_runtime.models.weights import AUDIO, PROJECTOR, Weights

EPS = 1e-5
AT_ONCE = 32
"""Chunks that are convolved together: each takes megabytes meanwhile, and a recording may have thousands."""
_LARGEST_HALF = torch.finfo(torch.float16).max - 1000


def tokens_of(frames: int) -> int:
    """The tokens of so many frames within a chunk: each of three convolutions halves them, and rounds up."""
    return -(-frames // 8)


def count_of(frames: int, chunk: int) -> int:
    """The tokens of a spectrogram with so many frames of sound."""
    return frames // chunk * tokens_of(chunk) + tokens_of(frames % chunk)


class Convolution:
    """Halves both sides of a picture of the sound."""

    def __init__(self, weights: Weights, name: str, outputs: int, inputs: int) -> None:
        self._weight, self._bias = (
            weights.take(f"{name}.weight", outputs, inputs, 3, 3),
            weights.take(f"{name}.bias", outputs),
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.conv2d(x, self._weight, self._bias, stride=2, padding=1))


class Block:
    """A layer: attention and feed-forward, each over normed tokens and added to them."""

    def __init__(self, config: AudioConfig, weights: Weights, layer: int) -> None:
        prefix, size, inner = f"{AUDIO}layers.{layer}.", config.hidden_size, config.intermediate_size
        self._heads = config.heads
        q, k, v, self._out = (
            Projection(weights, f"{prefix}self_attn.{name}_proj", size, size) for name in ("q", "k", "v", "out")
        )
        self._qkv = (q, k, v)
        self._first = Projection(weights, f"{prefix}fc1", inner, size)
        self._second = Projection(weights, f"{prefix}fc2", size, inner)
        names = ("self_attn_layer_norm", "final_layer_norm")
        self._norms = [Norm(weights, prefix + name, size, rms=False, eps=EPS) for name in names]

    def __call__(self, x: torch.Tensor, windows: Sequence[int]) -> torch.Tensor:
        """x (tokens, hidden); windows: so many tokens see each other."""
        normed = self._norms[0](x)
        parts = (
            one(normed).view(len(x), self._heads, -1).transpose(0, 1)[None].split(windows, dim=2) for one in self._qkv
        )
        seen = [F.scaled_dot_product_attention(*one)[0].transpose(0, 1) for one in zip(*parts, strict=True)]
        x = x + self._out(torch.cat(seen).flatten(1))
        x = x + self._second(F.gelu(self._first(self._norms[1](x))))
        return x.clamp(-_LARGEST_HALF, _LARGEST_HALF) if x.dtype == torch.float16 else x


class AudioEncoder:
    """See `MediaEncoder`. An item's shape is (mel bins, frames), whole chunks; `grid[0]` of the frames are sound."""

    depth = 0

    def __init__(self, config: AudioConfig, weights: Weights) -> None:
        self._config = config
        self._dtype, self._device = weights.dtype, weights.device
        size, channels, bins = config.hidden_size, config.channels, config.bins
        self._convolutions = [
            Convolution(weights, f"{AUDIO}conv2d{i}", channels, 1 if i == 1 else channels) for i in (1, 2, 3)
        ]
        self._flat = weights.take(f"{AUDIO}conv_out.weight", size, channels * tokens_of(bins))
        self._blocks = [Block(config, weights, layer) for layer in range(config.depth)]
        self._norm = Norm(weights, f"{AUDIO}ln_post", size, rms=False, eps=EPS)
        self._first = Projection(weights, f"{PROJECTOR}linear_1", size, size)
        self._second = Projection(weights, f"{PROJECTOR}linear_2", config.out_size, size)
        self._positions = _sinusoids(tokens_of(config.chunk), size).to(self._device)

    def encode(self, items: Sequence[tuple[MediaItem, torch.Tensor]]) -> list[torch.Tensor]:
        config, chunk = self._config, self._config.chunk
        sounds = [frames.to(self._device, self._dtype) for _, frames in items]
        x = torch.cat([frames.view(config.bins, -1, chunk).transpose(0, 1) for frames in sounds])[:, None]
        x = torch.cat([self._convolved(few) for few in x.split(AT_ONCE)]) + self._positions.to(x.dtype)
        kept, counts = [], [item.count for item, _ in items]
        for (item, _), of_item in zip(items, x.split([frames.shape[1] // chunk for frames in sounds]), strict=True):
            kept.append(of_item.flatten(0, 1)[: item.count])
        x = torch.cat(kept)
        most = config.window // chunk * tokens_of(chunk)
        windows = [min(most, count - start) for count in counts for start in range(0, count, most)]
        for block in self._blocks:
            x = block(x, windows)
        x = self._second(F.gelu(self._first(self._norm(x))))
        return [one.clone() for one in x.split(counts)]  # a cache may keep one alone

    def _convolved(self, x: torch.Tensor) -> torch.Tensor:
        """(chunks, 1, mel bins, frames) → (chunks, tokens, hidden)."""
        for convolution in self._convolutions:
            x = convolution(x)
        return F.linear(x.permute(0, 3, 1, 2).flatten(2), self._flat)


def _sinusoids(length: int, size: int) -> torch.Tensor:
    """(length, size): sines, then cosines, of wavelengths up to 10,000 x 2 pi."""
    frequencies = torch.exp(-math.log(10000) / (size // 2 - 1) * torch.arange(size // 2).float())
    angles = torch.arange(length)[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=1)
