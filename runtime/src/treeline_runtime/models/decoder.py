"""The dense decoder that Llama, Qwen2 and Qwen3 share; they differ in biases and in query/key norms.

Tensors are flat over the step: (tokens, …). Projections that read the same input are one matrix.
"""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F

from treeline_runtime.core import Context
from treeline_runtime.models.config import ModelConfig
from treeline_runtime.models.rope import rope_tables, rotate
from treeline_runtime.models.weights import EMBEDDING, HEAD, Weights

logger = logging.getLogger(__name__)


class Linear:
    """Several projections of one input, stacked. `names` → their output sizes.

    The weight lies in memory as (inputs, outputs): with 2 to 16 rows a CPU's kernels are faster on it (measured with
    models/tiny: a decode step of 8 rows by 7 %), with one row or many it makes no difference.
    """

    def __init__(self, weights: Weights, prefix: str, names: dict[str, int], size: int, *, bias: bool) -> None:
        weight = _stack([weights.take(f"{prefix}{n}.weight", out, size) for n, out in names.items()])
        self._name = prefix + "+".join(names)
        self._weight = weight.t().contiguous().t()
        self._bias = _stack([weights.take(f"{prefix}{n}.bias", out) for n, out in names.items()]) if bias else None

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        y = F.linear(x, self._weight, self._bias)
        if context.adapters is None:
            return y
        delta = context.adapters.delta(self._name, x)
        return y if delta is None else y + delta


def _stack(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()


class Attention:
    """Self-attention of one layer: projections, optional query/key norm, rope, the backend, output projection."""

    def __init__(self, config: ModelConfig, weights: Weights, layer: int) -> None:
        prefix = f"model.layers.{layer}.self_attn."
        dim = config.head_dim
        sizes = {"q_proj": config.num_heads * dim} | dict.fromkeys(("k_proj", "v_proj"), config.num_kv_heads * dim)
        self._layer = layer
        self._heads, self._kv_heads, self._dim = config.num_heads, config.num_kv_heads, dim
        self._eps = config.rms_norm_eps
        self._qkv = Linear(weights, prefix, sizes, config.hidden_size, bias=config.qkv_bias)
        self._o = Linear(weights, prefix, {"o_proj": config.hidden_size}, config.num_heads * dim, bias=config.o_bias)
        self._qk_norm: torch.Tensor | None = None
        if config.qk_norm:
            q_norm = weights.take(f"{prefix}q_norm.weight", dim).expand(self._heads, dim)
            k_norm = weights.take(f"{prefix}k_norm.weight", dim).expand(self._kv_heads, dim)
            self._qk_norm = torch.cat((q_norm, k_norm))

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        qkv = self._qkv(x, context).view(-1, self._heads + 2 * self._kv_heads, self._dim)
        qk, v = qkv.split((self._heads + self._kv_heads, self._kv_heads), dim=1)
        if self._qk_norm is not None:
            qk = F.rms_norm(qk, (self._dim,), eps=self._eps) * self._qk_norm
        q, k = rotate(qk, context.cos, context.sin).split((self._heads, self._kv_heads), dim=1)
        return self._o(context.attention.forward(self._layer, q, k, v, context.plan), context)


class Layer:
    """Norm, attention, norm, gated feed-forward, each added to the residual."""

    def __init__(self, config: ModelConfig, weights: Weights, layer: int) -> None:
        prefix = f"model.layers.{layer}."
        hidden, inner = config.hidden_size, config.intermediate_size
        self._shape, self._eps = (hidden,), config.rms_norm_eps
        self._norm1 = weights.take(f"{prefix}input_layernorm.weight", hidden)
        self._attention = Attention(config, weights, layer)
        self._norm2 = weights.take(f"{prefix}post_attention_layernorm.weight", hidden)
        mlp = f"{prefix}mlp."
        self._gate_up = Linear(weights, mlp, {"gate_proj": inner, "up_proj": inner}, hidden, bias=config.mlp_bias)
        self._down = Linear(weights, mlp, {"down_proj": hidden}, inner, bias=config.mlp_bias)

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        x = x + self._attention(F.rms_norm(x, self._shape, self._norm1, self._eps), context)
        gate, up = self._gate_up(F.rms_norm(x, self._shape, self._norm2, self._eps), context).chunk(2, dim=-1)
        return x + self._down(F.silu(gate) * up, context)


class Decoder:
    """Embedding, layers, norm, head. `context_length` sizes the rope table."""

    def __init__(self, config: ModelConfig, weights: Weights, context_length: int) -> None:
        self.config = config
        self._embedding, self._head = _embedding_and_head(config, weights)
        self._layers = [Layer(config, weights, i) for i in range(config.num_layers)]
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
        for layer in self._layers:
            x = layer(x, context)
        return F.rms_norm(x, (self.config.hidden_size,), self._norm, self.config.rms_norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(rows, hidden) → (rows, vocabulary), float32."""
        return F.linear(hidden, self._head).float()


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
