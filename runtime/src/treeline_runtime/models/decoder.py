"""The decoder shared by all families; a `ModelConfig` describes the differences (`families/`).

A layer has two sublayers, attention and feed-forward. Each reads the residual stream, normed or not, and its result may
be normed before it is added.

Tensors are flat over the step: (tokens, …). Projections with the same input are one matrix.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from treeline_runtime.context import Context
from treeline_runtime.models.config import ModelConfig
from treeline_runtime.models.pooler import Pooler
from treeline_runtime.models.quantization.product import float_product, kv_scales, new_product, stack
from treeline_runtime.models.rope import rope_tables
from treeline_runtime.models.rope_config import RopeConfig
from treeline_runtime.models.weights import EMBEDDING, HEAD, OUTPUTS, Shard, Weights
from treeline_runtime.ops import Activation, Heads, Ops, ops_for

logger = logging.getLogger(__name__)


class Linear:
    """Stacked projections of one input, in any weight format. `names` → their output sizes.

    shard: the part of one rank. With `OUTPUTS` (column-parallel) it gives its slice of each projection's outputs; with
    `INPUTS` (row-parallel) it takes its slice of the input, and all ranks' outputs must be added. A packed projection
    cannot be shared.
    """

    def __init__(
        self,
        weights: Weights,
        ops: Ops,
        prefix: str,
        names: dict[str, int],
        size: int,
        *,
        bias: bool,
        shard: Shard | None = None,
    ) -> None:
        self._name = prefix + "+".join(names)
        self._product = new_product(weights, ops, prefix, names, size, shard)
        self._bias: torch.Tensor | None = None
        if bias and (shard is None or shard.dim == OUTPUTS or shard.rank == 0):  # to a sum it is added once
            own = shard if shard is not None and shard.dim == OUTPUTS else None
            self._bias = stack([weights.take(f"{prefix}{n}.bias", out, shard=own) for n, out in names.items()])

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        y = self._product(x, self._bias)
        if context.adapters is None:
            return y
        delta = context.adapters.delta(self._name, x)
        return y if delta is None else y + delta


def norm_weight(config: ModelConfig, weights: Weights, name: str, size: int) -> torch.Tensor:
    """The factor of normed values. 1 + weight stays float32, as in transformers: most weights are small, and 16 bits
    would round them to few values near 1."""
    weight = weights.take(f"{name}.weight", size)
    return weight.float() + 1 if config.norm_adds_one else weight


class Attention:
    """A layer's self-attention: projections, optional query/key norm, rope, backend, output projection."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, layer: int) -> None:
        prefix = f"model.layers.{layer}.self_attn."
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        sizes = {"q_proj": heads * dim} | dict.fromkeys(("k_proj", "v_proj"), kv_heads * dim)
        if config.packed:
            sizes = {"qkv_proj": sum(sizes.values())}
        self._ops, self._layer = ops, layer
        self._qkv = Linear(weights, ops, prefix, sizes, config.hidden_size, bias=config.qkv_bias)
        self._o = Linear(weights, ops, prefix, {"o_proj": config.hidden_size}, heads * dim, bias=config.o_bias)
        norm: torch.Tensor | None = None
        if config.qk_norm:
            parts = []
            for name, count in (("q_norm", heads), ("k_norm", kv_heads)):
                size = count * dim if config.qk_norm_over_heads else dim
                parts.append(norm_weight(config, weights, prefix + name, size).view(-1, dim).expand(count, dim))
            norm = torch.cat(parts)
        self._sinks = weights.take(f"{prefix}sinks", heads).float() if config.scoring.sinks else None
        is_local = config.local_rope is not None and config.scoring.window(layer) is not None
        self._heads = Heads(heads, kv_heads, dim, norm, config.rms_norm_eps, config.qk_norm_over_heads, int(is_local))

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        q, k, v = self._ops.rotate_and_store(self._qkv(x, context), self._heads, self._layer, context)
        return self._o(context.attention.forward(self._layer, q, k, v, context.plan, self._sinks), context)


class FeedForward:
    """Gated feed-forward: gate and up, activation of gate times up, down."""

    def __init__(
        self,
        weights: Weights,
        ops: Ops,
        prefix: str,
        hidden: int,
        inner: int,
        *,
        bias: bool,
        packed: bool = False,
        activation: Activation = "silu",
    ) -> None:
        sizes = {"gate_up_proj": 2 * inner} if packed else {"gate_proj": inner, "up_proj": inner}
        self._ops, self._activation = ops, activation
        self._gate_up = Linear(weights, ops, prefix, sizes, hidden, bias=bias)
        self._down = Linear(weights, ops, prefix, {"down_proj": hidden}, inner, bias=bias)

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        return self._down(self._ops.gate(self._gate_up(x, context), self._activation), context)


@dataclass(frozen=True, slots=True)
class Sublayer:
    """Reads the residual stream and adds to it; with optional norms before and after."""

    before: torch.Tensor | None
    compute: Callable[[torch.Tensor, Context], torch.Tensor]
    after: torch.Tensor | None


class Layer:
    """Attention and feed-forward."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, layer: int) -> None:
        prefix = f"model.layers.{layer}."

        def norm(name: str | None) -> torch.Tensor | None:
            return norm_weight(config, weights, prefix + name, config.hidden_size) if name else None

        names = config.norms
        self._attention = Attention(config, weights, ops, layer)
        self._feed_forward = self.new_feed_forward(config, weights, ops, layer)
        self.sublayers = (
            Sublayer(norm(names.before_attention), self._attention, norm(names.after_attention)),
            Sublayer(norm(names.before_mlp), self._feed_forward, norm(names.after_mlp)),
        )

    @staticmethod
    def new_feed_forward(
        config: ModelConfig, weights: Weights, ops: Ops, layer: int
    ) -> Callable[[torch.Tensor, Context], torch.Tensor]:
        return FeedForward(
            weights,
            ops,
            f"model.layers.{layer}.mlp.",
            config.hidden_size,
            config.intermediate_size,
            bias=config.mlp_bias,
            packed=config.packed,
            activation=config.activation,
        )


class Decoder:
    """Embedding, layers, norm, head. `context_length` sizes the rope tables."""

    layer_type: type[Layer] = Layer
    pooler: Pooler | None = None
    """Makes vectors of hidden states, if the model is served for these."""

    def __init__(self, config: ModelConfig, weights: Weights, context_length: int) -> None:
        self.config = config
        self._embedding, head = _embedding_and_head(config, weights)
        dtype, device = self._embedding.dtype, self._embedding.device
        # rounded as the embedding is: transformers multiplies with a tensor of that type
        self._scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        self.ops = ops_for(device)
        self._head = float_product(self.ops, head, shared=head is self._embedding)
        self._layers = [self.layer_type(config, weights, self.ops, i) for i in range(config.num_layers)]
        self.kv_scales = kv_scales(weights, config.num_layers)
        self._norm = norm_weight(config, weights, "model.norm", config.hidden_size)
        ropes = [rope for rope in (config.rope, config.local_rope) if rope is not None]
        self._cos, self._sin = self._tables(ropes, context_length, dtype, device)

    def _tables(
        self, ropes: list[RopeConfig], length: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cos, sin, each (ropes, length, rotated elements of a head)."""
        dim, trained = self.config.head_dim, self.config.max_position
        cos, sin = zip(*(rope_tables(rope, dim, trained, length, dtype, device) for rope in ropes), strict=True)
        return torch.stack(cos), torch.stack(sin)

    @property
    def rope(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, each (ropes, positions, rotated elements of a head)."""
        return self._cos, self._sin

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids (tokens,) → (tokens, hidden), a new tensor."""
        x = F.embedding(input_ids, self._embedding)
        return x if self._scale == 1 else x * self._scale

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """x (tokens, hidden), from `embed` or elsewhere → normalised hidden states (tokens, hidden)."""
        residual: torch.Tensor | None = None
        after: torch.Tensor | None = None
        for layer in self._layers:
            for sublayer in layer.sublayers:
                x, residual = self._join(x, residual, after, sublayer.before)
                x, after = sublayer.compute(x, context), sublayer.after
        return self._join(x, residual, after, self._norm)[0]

    def _join(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        after: torch.Tensor | None,
        before: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds x, normed by `after`, to the residual stream (None: x begins it). Returns the stream normed by `before`,
        and the stream."""
        eps = self.config.rms_norm_eps
        if residual is not None:
            return self.ops.add_norm(x, residual, before, eps, after)
        return (x if before is None else self.ops.norm(x, before, eps)), x

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """(rows, hidden) → (rows, vocabulary), in `out` if given"""
        head = self._head
        logits = head(hidden, None) if out is None else torch.mm(hidden, head.weight.t(), out=out)
        cap = self.config.logit_softcap
        return logits if cap is None else self.ops.softcap(logits, cap)


def _embedding_and_head(config: ModelConfig, weights: Weights) -> tuple[torch.Tensor, torch.Tensor]:
    """One matrix if config.json ties them, unless the checkpoint has two different ones, as in transformers."""
    shape = (config.vocab_size, config.hidden_size)
    if not config.tie_word_embeddings:
        return weights.take(EMBEDDING, *shape), weights.take(HEAD, *shape)
    if not weights.has(HEAD):
        embedding = weights.take(EMBEDDING, *shape)
        return embedding, embedding
    head = weights.take(HEAD, *shape)
    if not weights.has(EMBEDDING):
        return head, head
    embedding = weights.take(EMBEDDING, *shape)
    if torch.equal(embedding, head):
        return embedding, embedding
    logger.warning("config.json ties embedding and head, but the checkpoint has two that differ: both are used")
    return embedding, head
