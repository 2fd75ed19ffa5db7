"""The encoder of Qwen2.5-VL and Qwen3-VL: a transformer over the patches of images and videos.

Patches come from the processor in blocks of merge x merge, row by row of blocks; a block becomes a token. A frame's
patches see each other, or in Qwen2.5-VL's layers with a window those of their window alone. Heads are rotated by row
and column; Qwen3-VL also adds learned positions, and takes features from layers on the way (deepstack).

Items are encoded together. Attention is one product per length of what sees each other: equal images, and almost all
windows, are computed at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from treeline_runtime.messages import MediaItem
from treeline_runtime.models.model_config import VisionConfig
from treeline_runtime.models.rope import rotate
from treeline_runtime.models.weights import VISION, Weights

EPS = 1e-6
Segments = list[torch.Tensor]
"""The patches that see each other, for each length: (segments, length) int64."""


class Projection:
    def __init__(self, weights: Weights, name: str, outputs: int, inputs: int, *, bias: bool = True) -> None:
        self._weight = weights.take(f"{name}.weight", outputs, inputs)
        self._bias = weights.take(f"{name}.bias", outputs) if bias else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)


class Norm:
    """An RMS norm, or a LayerNorm."""

    def __init__(self, weights: Weights, name: str, size: int, *, rms: bool, eps: float = EPS) -> None:
        self._weight, self._eps = weights.take(f"{name}.weight", size), eps
        self._bias = None if rms else weights.take(f"{name}.bias", size)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._bias is None:
            return torch.rms_norm(x, self._weight.shape, self._weight, self._eps)
        return F.layer_norm(x, self._weight.shape, self._weight, self._bias, self._eps)


class FeedForward:
    """Gated by silu, or plain with gelu."""

    def __init__(self, config: VisionConfig, weights: Weights, prefix: str) -> None:
        size, inner = config.hidden_size, config.intermediate_size
        inward, outward = (("gate_proj", "up_proj"), "down_proj") if config.gated else (("linear_fc1",), "linear_fc2")
        self._in = [Projection(weights, prefix + name, inner, size) for name in inward]
        self._out = Projection(weights, prefix + outward, size, inner)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        first, *second = (project(x) for project in self._in)
        return self._out(F.silu(first).mul_(second[0]) if second else F.gelu(first, approximate="tanh"))


class Block:
    """A layer: attention and feed-forward, each over normed patches and added to them."""

    def __init__(self, config: VisionConfig, weights: Weights, layer: int) -> None:
        prefix, size = f"{VISION}blocks.{layer}.", config.hidden_size
        self._heads = config.heads
        self._qkv = Projection(weights, f"{prefix}attn.qkv", 3 * size, size)
        self._out = Projection(weights, f"{prefix}attn.proj", size, size)
        self._feed_forward = FeedForward(config, weights, f"{prefix}mlp.")
        self._norms = [Norm(weights, f"{prefix}norm{i}", size, rms=config.gated) for i in (1, 2)]
        self.is_windowed = config.window is not None and layer not in config.full

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, segments: Segments) -> torch.Tensor:
        """x (patches, hidden); cos, sin (patches, 1, head) float32."""
        q, k, v = self._qkv(self._norms[0](x)).view(len(x), 3, self._heads, -1).unbind(1)
        q, k = (rotate(heads.float(), cos, sin).to(x.dtype) for heads in (q, k))
        seen = torch.empty_like(q)
        for patches in segments:
            each = [heads[patches].transpose(1, 2) for heads in (q, k, v)]
            seen[patches] = F.scaled_dot_product_attention(each[0], each[1], each[2]).transpose(1, 2)
        x = x + self._out(seen.flatten(1))
        return x + self._feed_forward(self._norms[1](x))


class Merger:
    """Makes tokens of blocks of patches. The norm is over a patch, or over a block where features are taken."""

    def __init__(self, config: VisionConfig, weights: Weights, prefix: str, *, norms_blocks: bool = False) -> None:
        self._size = size = config.hidden_size * config.merge**2
        norm, first, second = ("ln_q", "mlp.0", "mlp.2") if config.gated else ("norm", "linear_fc1", "linear_fc2")
        self._norms_blocks = norms_blocks
        normed = size if norms_blocks else config.hidden_size
        self._norm = Norm(weights, prefix + norm, normed, rms=config.gated)
        self._first = Projection(weights, prefix + first, size, size)
        self._second = Projection(weights, prefix + second, config.out_size, size)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x (patches, hidden) → (tokens, the decoder's hidden)"""
        x = self._norm(x.view(-1, self._size)) if self._norms_blocks else self._norm(x).view(-1, self._size)
        return self._second(F.gelu(self._first(x)))


class VisionEncoder:
    """See `MediaEncoder`."""

    def __init__(self, config: VisionConfig, weights: Weights) -> None:
        self._config = config
        self._dtype, self._device = weights.dtype, weights.device
        self.depth = len(config.deepstack)
        size, side = config.hidden_size, config.learned_side
        # in the order of their names, in which they are read
        self._blocks = [Block(config, weights, layer) for layer in range(config.depth)]
        names = [f"{VISION}deepstack_merger_list.{i}." for i in range(self.depth)]
        self._deepstack = [Merger(config, weights, name, norms_blocks=True) for name in names]
        self._merger = Merger(config, weights, f"{VISION}merger.")
        name = f"{VISION}patch_embed.proj"
        self._bias = None if config.gated else weights.take(f"{name}.bias", size)
        kernel = weights.take(f"{name}.weight", size, config.channels, config.frames, config.patch, config.patch)
        self._patches = kernel.flatten(1)
        self._learned = weights.take(f"{VISION}pos_embed.weight", side * side, size) if side else None
        quarter = size // config.heads // 4
        exponents = torch.arange(quarter, dtype=torch.float32) / quarter
        self._frequencies = (1.0 / config.rope_theta**exponents).to(self._device)

    def encode(self, items: Sequence[tuple[MediaItem, torch.Tensor]]) -> list[torch.Tensor]:
        config = self._config
        x = torch.cat([pixels.to(self._device, self._dtype) for _, pixels in items])
        x = F.linear(x, self._patches, self._bias)
        places = places_of([item.grid for item, _ in items], config.merge)
        on_device = torch.from_numpy(places).to(self._device)
        if self._learned is not None:
            x = x + stretched(self._learned, on_device).to(x.dtype)
        angles = (on_device[1:3, :, None] * self._frequencies).permute(1, 0, 2).flatten(1)
        cos, sin = angles.cos(), angles.sin()
        cos, sin = torch.cat((cos, cos), dim=1)[:, None], torch.cat((-sin, sin), dim=1)[:, None]
        frames = segments(places[0], self._device)
        windows = frames
        if config.window is not None:
            windows = segments(windows_of(places, config.window * config.merge), self._device)
        features: list[torch.Tensor] = []
        for layer, block in enumerate(self._blocks):
            x = block(x, cos, sin, windows if block.is_windowed else frames)
            if layer in config.deepstack:
                features.append(self._deepstack[len(features)](x))
        tokens = torch.cat((self._merger(x), *features), dim=1)
        # copies, as an item may be kept longer than the others
        return [one.clone() for one in tokens.split([item.count for item, _ in items])]


def places_of(grids: Sequence[tuple[int, int, int]], merge: int) -> npt.NDArray[np.int64]:
    """Where the patches of all items are: (5, patches), the frame, counted over all items, the row, the column, and the
    rows and columns of the whole frame."""
    found, frame = [], 0
    for frames, rows, columns in grids:
        blocks = np.indices((frames, rows // merge, columns // merge, merge, merge)).reshape(5, -1)
        item = np.empty((5, blocks.shape[1]), dtype=np.int64)
        item[0] = frame + blocks[0]
        item[1:3] = blocks[1:3] * merge + blocks[3:5]
        item[3:] = [[rows], [columns]]
        found.append(item)
        frame += frames
    return np.concatenate(found, axis=1)


def windows_of(places: npt.NDArray[np.int64], side: int) -> npt.NDArray[np.int64]:
    """The number of each patch's window, (patches,). side: of a window, in patches; those at the end may be smaller."""
    (rows, columns), (most_rows, most_columns) = places[1:3] // side, places[3:].max(axis=1) // side + 1
    return (places[0] * most_rows + rows) * most_columns + columns


def segments(numbers: npt.NDArray[np.int64], device: torch.device) -> Segments:
    """Puts patches with the same number into a segment."""
    order = np.argsort(numbers, kind="stable")
    _, starts, lengths = np.unique(numbers[order], return_index=True, return_counts=True)
    return [
        torch.from_numpy(order[starts[lengths == length, None] + np.arange(length)]).to(device)
        for length in np.unique(lengths)
    ]


def stretched(learned: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """learned (side x side, hidden), positions of a square grid; places as from `places_of` → (patches, hidden): the
    grid's corners are put on those of the frame, and a patch has the mean of the four positions around it, by nearness.
    """
    side = round(len(learned) ** 0.5)
    at = places[1:3] * float(side - 1) / (places[3:] - 1).clamp(min=1)
    low = at.floor()
    share = at - low
    below = low.long()
    above = (below + 1).clamp(max=side - 1)
    total = torch.zeros((), device=learned.device)
    for row, of_row in ((below[0], 1 - share[0]), (above[0], share[0])):
        for column, of_column in ((below[1], 1 - share[1]), (above[1], share[1])):
            total = total + learned[row * side + column] * (of_row * of_column)[:, None]
    return total
