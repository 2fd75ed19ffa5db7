"""The operations in PyTorch: the reference, and what a CPU runs."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from treeline_runtime.core import Context
from treeline_runtime.models.rope import rotate
from treeline_runtime.ops.base import Heads
from treeline_runtime.sampling.sampler import choose


class TorchOps:
    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, weight, bias)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return F.rms_norm(total, (total.shape[-1],), weight, eps), total

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def rotate_and_store(
        self, qkv: torch.Tensor, heads: Heads, layer: int, context: Context
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        qkv = qkv.view(-1, heads.query + 2 * heads.kv, heads.dim)
        qk, v = qkv.split((heads.query + heads.kv, heads.kv), dim=1)
        if heads.norm is not None:
            qk = F.rms_norm(qk, (heads.dim,), eps=heads.eps) * heads.norm
        q, k = rotate(qk, context.cos, context.sin).split((heads.query, heads.kv), dim=1)
        context.attention.pool.store(layer, context.slots, k, v)
        return q, k, v

    def stored_finite(self, context: Context) -> torch.Tensor:
        return context.attention.pool.are_finite(context.slots)

    def choose(
        self, logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return choose(logits, temperatures, keys)
