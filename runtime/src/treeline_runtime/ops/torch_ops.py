"""The operations in PyTorch: the reference, and what a CPU runs."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from treeline_runtime.core import Context
from treeline_runtime.models.rope import rotate
from treeline_runtime.ops.base import Activation, Heads
from treeline_runtime.sampling.sampler import choose


class TorchOps:
    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, weight, bias)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if weight.dtype == x.dtype:
            return F.rms_norm(x, weight.shape, weight, eps)
        return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)

    def add_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        after: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = residual + (x if after is None else self.norm(x, after, eps))
        return total if weight is None else self.norm(total, weight, eps), total

    def gate(self, gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up

    def softcap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        return x.div_(cap).tanh_().mul_(cap)

    def rotate_and_store(
        self, qkv: torch.Tensor, heads: Heads, layer: int, context: Context
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        qkv = qkv.view(-1, heads.query + 2 * heads.kv, heads.dim)
        qk, v = qkv.split((heads.query + heads.kv, heads.kv), dim=1)
        if heads.norm is not None:
            qk = self._norm_heads(qk, heads, heads.norm)
        qk = rotate(qk, context.cos[heads.rope], context.sin[heads.rope])
        q, k = qk.split((heads.query, heads.kv), dim=1)
        context.attention.pool.store(layer, context.slots, k, v)
        return q, k, v

    def _norm_heads(self, qk: torch.Tensor, heads: Heads, weight: torch.Tensor) -> torch.Tensor:
        if not heads.norm_over_heads:
            return (F.rms_norm(qk.to(weight.dtype), (heads.dim,), eps=heads.eps) * weight).to(qk.dtype)
        parts = zip(*(x.split((heads.query, heads.kv), dim=-2) for x in (qk, weight)), strict=True)
        normed = [self.norm(x.flatten(1), w.flatten(), heads.eps).view_as(x) for x, w in parts]
        return torch.cat(normed, dim=1)

    def stored_finite(self, context: Context) -> torch.Tensor:
        return context.attention.pool.are_finite(context.slots)

    def choose(
        self, logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return choose(logits, temperatures, keys)
