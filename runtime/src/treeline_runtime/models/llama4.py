"""Llama 4: the decoder with layers that do not rotate, experts of its own, and its layouts in a checkpoint.

A token's score multiplies what its expert reads, not what it makes of it. A shared expert, without a gate, adds to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import torch

from treeline_runtime.context import Context
from treeline_runtime.models.config import ModelConfig
from treeline_runtime.models.decoder import Attention, Decoder, FeedForward, Layer, Linear
from treeline_runtime.models.moe_config import MoeConfig
from treeline_runtime.models.weights import Shard, Weights
from treeline_runtime.ops import Experts, Ops

_QUERY_OR_KEY = re.compile(r"model\.layers\.(\d+)\.self_attn\.[qk]_proj\.(weight|bias)")
_NORM = re.compile(r"model\.layers\.\d+\.self_attn\.[qk]_norm\.weight")


class Translated:
    """A checkpoint of Llama 4 as the decoder that all families share asks for it.

    - Its rope turns pairs of neighbours in a head; ours, the kernels' too, elements that are half a head apart. So of
      each head of queries and keys the first elements of all pairs come first, then the second ones. Products of
      queries with keys are the same in any order that both have. (What an adapter adds to them needs that order too.)
    - It divides queries and keys by their root mean square once they are rotated. As that is the same before, this is
      the shared decoder's norm, with weights of one.
    - It has another name for feed-forwards.
    """

    def __init__(self, weights: Weights, config: ModelConfig) -> None:
        assert config.irope is not None
        self._weights, self._head_dim, self._rotated = weights, config.head_dim, config.irope.rotated
        self.dtype, self.device, self.scheme = weights.dtype, weights.device, weights.scheme

    @staticmethod
    def _theirs(name: str) -> str:
        return name.replace(".mlp.", ".feed_forward.")

    def has(self, name: str) -> bool:
        return self._weights.has(self._theirs(name))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights.shape(self._theirs(name))

    def ignore(self, name: str) -> None:
        self._weights.ignore(self._theirs(name))

    def take(
        self, name: str, *shape: int, dtype: torch.dtype | None = None, shard: Shard | None = None
    ) -> torch.Tensor:
        if _NORM.fullmatch(name):
            return torch.ones(shape, device=self.device)  # of heads: all ranks have them whole
        tensor = self._weights.take(self._theirs(name), *shape, dtype=dtype, shard=shard)
        found = _QUERY_OR_KEY.fullmatch(name)
        if found is None or int(found[1]) not in self._rotated:
            return tensor
        pairs = tensor.unflatten(0, (-1, self._head_dim // 2, 2))
        return pairs.transpose(1, 2).flatten(0, 2)


class Llama4Attention(Attention):
    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, layer: int) -> None:
        super().__init__(config, weights, ops, layer)
        assert config.irope is not None
        self._rotates = layer in config.irope.rotated
        if not self._rotates:
            self._heads = replace(self._heads, norm=None, rope=None)

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        q, k, v = self._ops.rotate_and_store(self._qkv(x, context), self._heads, self._layer, context)
        if context.query_scales is not None and not self._rotates:
            q.mul_(context.query_scales)
        return self._o(context.attention.forward(self._layer, q, k, v, context.plan), context)


class Llama4Moe:
    """A router, its experts, and the expert that every token goes to."""

    def __init__(self, ops: Ops, moe: MoeConfig, weights: Weights, prefix: str, hidden: int) -> None:
        self._ops, self._top_k = ops, moe.top_k
        self._router = Linear(weights, ops, prefix, {"router": moe.num_experts}, hidden, bias=False)
        self._experts = take_experts(weights, f"{prefix}experts.", moe, hidden)
        shared = f"{prefix}shared_expert."
        self._shared = FeedForward(weights, ops, shared, hidden, moe.shared_intermediate_size, bias=False)

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        return self._shared(x, context).add_(self._routed(x, context))

    def _routed(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        scores, ids = self._ops.route(self._router(x, context), self._top_k, normalise=False, sigmoid=True)
        # each pair of a token and an expert is a token of its own here: what they read differs
        scaled = (x[:, None] * scores[..., None].to(x.dtype)).flatten(0, 1)
        pairs = self._ops.experts(scaled, self._experts, torch.ones_like(scores).view(-1, 1), ids.view(-1, 1))
        return pairs.view(*ids.shape, -1).sum(1)


def take_experts(weights: Weights, prefix: str, moe: MoeConfig, hidden: int) -> Experts:
    count, inner = moe.num_experts, moe.intermediate_size
    return Experts(
        _take_stack(weights, f"{prefix}gate_up_proj", count, hidden, 2 * inner),
        _take_stack(weights, f"{prefix}down_proj", count, inner, hidden),
    )


def _take_stack(weights: Weights, name: str, count: int, inputs: int, outputs: int) -> torch.Tensor:
    """(count, outputs, inputs). Checkpoints have inputs first, as a CPU wants them in memory (`moe.new_stack`)."""
    stack = weights.take(name, count, inputs, outputs).transpose(1, 2)
    return stack if weights.device.type == "cpu" else stack.contiguous()


class Llama4Layer(Layer):
    attention_type = Llama4Attention

    @staticmethod
    def new_feed_forward(
        config: ModelConfig, weights: Weights, ops: Ops, layer: int
    ) -> Callable[[torch.Tensor, Context], torch.Tensor]:
        moe = config.moe
        if moe is None or layer not in moe.layers:
            return Layer.new_feed_forward(config, weights, ops, layer)
        return Llama4Moe(ops, moe, weights, f"model.layers.{layer}.mlp.", config.hidden_size)


class Llama4Decoder(Decoder):
    layer_type = Llama4Layer

    def __init__(self, config: ModelConfig, weights: Weights, context_length: int) -> None:
        super().__init__(config, Translated(weights, config), context_length)
        assert config.irope is not None
        self._query_scales: torch.Tensor | None = None
        if (temperature := config.irope.temperature) is not None:
            past = torch.floor(torch.arange(1, context_length + 1) / temperature.floor)
            self._query_scales = (torch.log1p(past) * temperature.scale + 1).to(weights.device)

    def query_scales(self, positions: torch.Tensor) -> torch.Tensor | None:
        return None if self._query_scales is None else self._query_scales[positions].view(-1, 1, 1)
