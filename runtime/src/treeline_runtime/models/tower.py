"""Encoders of pictures of one size: SigLIP as in Gemma 3, and InternViT. A transformer over patches, all of which see
each other.

A square of neighbouring patches becomes a token: Gemma 3 takes their mean, InternVL puts them one behind the other. An
item is one picture, or several: InternVL's tiles, and a small picture of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from treeline_runtime.messages import MediaItem
from treeline_runtime.models.model_config import TowerConfig
from treeline_runtime.models.vision import Norm, Projection
from treeline_runtime.models.weights import PROJECTOR, TOWER, Weights

AT_ONCE = 4
"""Pictures that are encoded together: Gemma 3's have 4,096 patches each, which take 0.1 GB meanwhile."""


class Block:
    """A layer: attention and feed-forward, each over normed patches and added to them; InternViT's are scaled."""

    def __init__(self, config: TowerConfig, weights: Weights, prefix: str) -> None:
        size, inner, self._heads, self._tanh = config.hidden_size, config.intermediate_size, config.heads, config.means
        attention, out, norms = "self_attn.", "out_proj", ("layer_norm1", "layer_norm2")
        if not config.means:
            attention, out, norms = "attention.", "projection_layer", ("layernorm_before", "layernorm_after")
        self._qkv = [
            Projection(weights, f"{prefix}{attention}{name}_proj", size, size, bias=config.qkv_bias) for name in "qkv"
        ]
        names = [f"{prefix}{attention}{name}_norm" for name in "qk"] if config.qk_norm else []
        self._qk_norms = [Norm(weights, name, size, rms=True) for name in names]
        self._out = Projection(weights, f"{prefix}{attention}{out}", size, size)
        self._norms = [Norm(weights, prefix + name, size, rms=config.rms, eps=config.eps) for name in norms]
        self._first = Projection(weights, f"{prefix}mlp.fc1", inner, size)
        self._second = Projection(weights, f"{prefix}mlp.fc2", size, inner)
        self._scales = [None if config.means else weights.take(f"{prefix}lambda_{i}", size) for i in (1, 2)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x (pictures, patches, hidden)"""
        normed = self._norms[0](x)
        parts = [project(normed) for project in self._qkv]
        for i, norm in enumerate(self._qk_norms):
            parts[i] = norm(parts[i])
        q, k, v = (part.unflatten(2, (self._heads, -1)).transpose(1, 2) for part in parts)
        x = self._add(0, x, self._out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
        inner = F.gelu(self._first(self._norms[1](x)), approximate="tanh" if self._tanh else "none")
        return self._add(1, x, self._second(inner))

    def _add(self, number: int, x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        scale = self._scales[number]
        return x + (result if scale is None else result * scale)


class Means:
    """Gemma 3's tokens: means of patches, normed and projected."""

    def __init__(self, config: TowerConfig, weights: Weights) -> None:
        size, self._eps = config.hidden_size, config.eps
        self._norm = weights.take(f"{PROJECTOR}mm_soft_emb_norm.weight", size, dtype=torch.float32) + 1
        self._weight = weights.take(f"{PROJECTOR}mm_input_projection_weight", size, config.out_size)

    def __call__(self, squares: torch.Tensor) -> torch.Tensor:
        """squares (tokens, patches of a square, hidden) → (tokens, the decoder's hidden)"""
        x = squares.mean(1)
        return torch.rms_norm(x.float(), self._norm.shape, self._norm, self._eps).to(x.dtype) @ self._weight


class Joined:
    """InternVL's tokens: patches one behind the other, normed, and through a feed-forward."""

    def __init__(self, config: TowerConfig, weights: Weights) -> None:
        size = config.hidden_size * config.merge**2
        self._norm = Norm(weights, f"{PROJECTOR}layer_norm", size, rms=False, eps=1e-5)
        self._first = Projection(weights, f"{PROJECTOR}linear_1", config.out_size, size)
        self._second = Projection(weights, f"{PROJECTOR}linear_2", config.out_size, config.out_size)

    def __call__(self, squares: torch.Tensor) -> torch.Tensor:
        """As `Means`."""
        return self._second(F.gelu(self._first(self._norm(squares.flatten(1)))))


class Tower:
    """See `MediaEncoder`. An item's shape is (pictures, colours, side, side)."""

    depth = 0

    def __init__(self, config: TowerConfig, weights: Weights) -> None:
        self._config, self._dtype, self._device = config, weights.dtype, weights.device
        size, patches = config.hidden_size, config.patches_of_side**2
        prefix = f"{TOWER}vision_model." if weights.has(f"{TOWER}vision_model.post_layernorm.weight") else TOWER
        layers, patch, positions = "layers", "patch_embedding", "position_embedding.weight"
        self._class = self._norm = None
        if config.means:
            weights.ignore(f"{prefix}head")  # of SigLIP alone
            shape: tuple[int, ...] = (patches, size)
            self._norm = Norm(weights, f"{prefix}post_layernorm", size, rms=False, eps=config.eps)
        else:
            layers, patch, positions = "layer", "patch_embeddings.projection", "position_embeddings"
            shape = (1, patches + 1, size)
            self._class = weights.take(f"{prefix}embeddings.cls_token", 1, 1, size)
        name = f"{prefix}embeddings.{patch}"
        self._kernel = weights.take(f"{name}.weight", size, config.channels, config.patch, config.patch)
        self._bias = weights.take(f"{name}.bias", size)
        self._positions = weights.take(f"{prefix}embeddings.{positions}", *shape)
        names = [f"{prefix}encoder.{layers}.{i}." for i in range(config.depth)]
        self._blocks = [Block(config, weights, name) for name in names]
        self._tokens = (Means if config.means else Joined)(config, weights)

    def encode(self, items: Sequence[tuple[MediaItem, torch.Tensor]]) -> list[torch.Tensor]:
        pictures = [picture for _, pixels in items for picture in pixels]
        groups = (pictures[start : start + AT_ONCE] for start in range(0, len(pictures), AT_ONCE))
        made = torch.cat([self._encoded(torch.stack(few).to(self._device, self._dtype)) for few in groups])
        return [one.clone() for one in made.split([item.count for item, _ in items])]  # a cache may keep one alone

    def _encoded(self, x: torch.Tensor) -> torch.Tensor:
        """(pictures, colours, side, side) → (tokens of all, the decoder's hidden)"""
        config = self._config
        x = F.conv2d(x, self._kernel, self._bias, stride=config.patch).flatten(2).transpose(1, 2)
        if self._class is not None:
            x = torch.cat((self._class.expand(len(x), -1, -1), x), dim=1)
        x = x + self._positions
        for block in self._blocks:
            x = block(x)
        x = x[:, 1:] if self._norm is None else self._norm(x)
        side, merge = config.patches_of_side // config.merge, config.merge
        squares = x.unflatten(1, (side, merge, side, merge)).transpose(2, 3)
        return self._tokens(squares.flatten(3, 4).flatten(0, 2))
