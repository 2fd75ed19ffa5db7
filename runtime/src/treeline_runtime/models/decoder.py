"""The dense decoder that Llama, Qwen2 and Qwen3 share; they differ in biases and in query/key norms.

Tensors are flat over the step: (tokens, …). Projections that read the same input are one matrix.
"""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F

from treeline_runtime.core import Context
from treeline_runtime.models.config import ModelConfig
from treeline_runtime.models.pooler import Pooler
from treeline_runtime.models.quantization.kv import kv_scales
from treeline_runtime.models.quantization.product import new_product, stack
from treeline_runtime.models.rope import rope_tables
from treeline_runtime.models.weights import EMBEDDING, HEAD, Weights
from treeline_runtime.ops import Heads, Ops, ops_for

logger = logging.getLogger(__name__)


class Linear:
    """Several projections of one input, stacked, in whatever format the weights are. `names` → their output sizes."""

    def __init__(
        self, weights: Weights, ops: Ops, prefix: str, names: dict[str, int], size: int, *, bias: bool
    ) -> None:
        self._name = prefix + "+".join(names)
        self._product = new_product(weights, ops, prefix, names, size)
        self._bias = stack([weights.take(f"{prefix}{n}.bias", out) for n, out in names.items()]) if bias else None

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        y = self._product(x, self._bias)
        if context.adapters is None:
            return y
        delta = context.adapters.delta(self._name, x)
        return y if delta is None else y + delta


class Attention:
    """Self-attention of one layer: projections, optional query/key norm, rope, the backend, output projection."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, layer: int) -> None:
        prefix = f"model.layers.{layer}.self_attn."
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        sizes = {"q_proj": heads * dim} | dict.fromkeys(("k_proj", "v_proj"), kv_heads * dim)
        self._ops, self._layer = ops, layer
        self._qkv = Linear(weights, ops, prefix, sizes, config.hidden_size, bias=config.qkv_bias)
        self._o = Linear(weights, ops, prefix, {"o_proj": config.hidden_size}, heads * dim, bias=config.o_bias)
        norm: torch.Tensor | None = None
        if config.qk_norm:
            q_norm = weights.take(f"{prefix}q_norm.weight", dim).expand(heads, dim)
            k_norm = weights.take(f"{prefix}k_norm.weight", dim).expand(kv_heads, dim)
            norm = torch.cat((q_norm, k_norm))
        self._heads = Heads(heads, kv_heads, dim, norm, config.rms_norm_eps)

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        q, k, v = self._ops.rotate_and_store(self._qkv(x, context), self._heads, self._layer, context)
        return self._o(context.attention.forward(self._layer, q, k, v, context.plan), context)


class Layer:
    """Norm, attention, norm, gated feed-forward, each added to the residual."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, layer: int) -> None:
        prefix = f"model.layers.{layer}."
        hidden, inner = config.hidden_size, config.intermediate_size
        self._ops, self._eps = ops, config.rms_norm_eps
        self._norm1 = weights.take(f"{prefix}input_layernorm.weight", hidden)
        self._attention = Attention(config, weights, ops, layer)
        self._norm2 = weights.take(f"{prefix}post_attention_layernorm.weight", hidden)
        mlp = f"{prefix}mlp."
        self._gate_up = Linear(weights, ops, mlp, {"gate_proj": inner, "up_proj": inner}, hidden, bias=config.mlp_bias)
        self._down = Linear(weights, ops, mlp, {"down_proj": hidden}, inner, bias=config.mlp_bias)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, context: Context
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`x` is what the layer before adds to `residual` (None: x is all there is). → the same of this layer."""
        if residual is None:
            x, residual = self._ops.norm(x, self._norm1, self._eps), x
        else:
            x, residual = self._ops.add_norm(x, residual, self._norm1, self._eps)
        x = self._attention(x, context)
        x, residual = self._ops.add_norm(x, residual, self._norm2, self._eps)
        return self._down(self._ops.gate(self._gate_up(x, context)), context), residual


class Decoder:
    """Embedding, layers, norm, head. `context_length` sizes the rope table."""

    pooler: Pooler | None = None
    """What makes vectors of its hidden states, where the model is served for these and not for text."""

    def __init__(self, config: ModelConfig, weights: Weights, context_length: int) -> None:
        self.config = config
        self._embedding, self._head = _embedding_and_head(config, weights)
        self.ops = ops_for(self._embedding.device)
        self._layers = [Layer(config, weights, self.ops, i) for i in range(config.num_layers)]
        self.kv_scales = kv_scales(weights, config.num_layers)
        self._norm = weights.take("model.norm.weight", config.hidden_size)
        self._cos, self._sin = rope_tables(
            config.rope,
            config.head_dim,
            config.max_position,
            context_length,
            self._embedding.dtype,
            self._embedding.device,
        )

    def rope(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines for these positions, as `Context` wants them: (tokens, 1, head_dim)."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)

    def forward(self, input_ids: torch.Tensor, context: Context) -> torch.Tensor:
        """input_ids (tokens,) → normalised hidden states (tokens, hidden)."""
        x = F.embedding(input_ids, self._embedding)
        residual: torch.Tensor | None = None
        for layer in self._layers:
            x, residual = layer(x, residual, context)
        assert residual is not None
        return self.ops.add_norm(x, residual, self._norm, self.config.rms_norm_eps)[0]

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """(rows, hidden) → (rows, vocabulary), in `out` if given"""
        return self.ops.linear(hidden, self._head, None) if out is None else torch.mm(hidden, self._head.t(), out=out)


def _embedding_and_head(config: ModelConfig, weights: Weights) -> tuple[torch.Tensor, torch.Tensor]:
    """One matrix where config.json ties them, unless the checkpoint has two different ones: as transformers does it."""
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
