"""The operations in PyTorch: the reference, and the CPU's implementation."""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F

from treeline_runtime.context import Context
from treeline_runtime.models.model_config import ClampedGate
from treeline_runtime.models.rope import rotate
from treeline_runtime.ops.base import Activation, Experts, Found, Heads, Tables
from treeline_runtime.sampling.sampler import choose


class TorchOps:
    def look_up(self, rows: torch.Tensor, positions: torch.Tensor, tables: Tables) -> Found:
        pages = tables.pages[rows, positions // tables.page_size]
        turned = positions if tables.deltas is None else (positions + tables.deltas[rows]).clamp_(min=0)
        return Found(
            tables.tokens[rows, positions],
            pages * tables.page_size + positions % tables.page_size,
            tables.cos[:, turned].unsqueeze(2),
            tables.sin[:, turned].unsqueeze(2),
            torch.zeros(len(rows), dtype=torch.int32, device=rows.device),
        )

    def put(self, ids: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> None:
        tokens[rows, positions] = ids

    linear = staticmethod(F.linear)
    choose = staticmethod(choose)

    def linear_into(
        self, room: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return room.copy_(F.linear(x, weight, bias))

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if weight.dtype != torch.float32:
            return torch.rms_norm(x, weight.shape, weight, eps)
        # torch.rms_norm is eight kernels and takes twice as long: |x| / sqrt(size) is the root mean square
        size = x.shape[-1]
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return (x * weight).div_(length.hypot_(_root(eps * size)).mul_(size**-0.5)).to(x.dtype)

    def add_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        after: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = residual.add_(x if after is None else self.norm(x, after, eps))
        return total if weight is None else self.norm(total, weight, eps), total

    def gate(self, gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")).mul_(up)

    def softcap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        return x.div_(cap).tanh_().mul_(cap)

    def route(self, logits: torch.Tensor, top_k: int, *, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        scores, ids = logits.softmax(-1, dtype=torch.float32).topk(top_k)
        return (scores / scores.sum(-1, keepdim=True) if normalise else scores), ids

    def experts(self, x: torch.Tensor, experts: Experts, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """A product per expert that has tokens, after making these neighbours."""
        tokens, top_k = ids.shape
        flat = (ids if experts.local is None else experts.local[ids]).flatten()
        order = flat.argsort(stable=True)
        sorted_x = x[order // top_k]
        sorted_y = torch.zeros_like(sorted_x)
        end = 0
        for expert, count in enumerate(flat.bincount()[: len(experts.down)].tolist()):
            if count:
                start, end = end, end + count
                sorted_y[start:end] = self._expert(sorted_x[start:end], experts, expert)
        y = torch.empty_like(sorted_y)
        y[order] = sorted_y
        return (y.view(tokens, top_k, -1) * scores[..., None]).sum(1).to(x.dtype)

    def _expert(self, x: torch.Tensor, experts: Experts, expert: int) -> torch.Tensor:
        in_bias, out_bias = (bias[expert] for bias in experts.biases) if experts.biases else (None, None)
        gate_up = F.linear(x, experts.gate_up[expert], in_bias)
        inner = self.gate(gate_up) if experts.clamped is None else _clamped_gate(gate_up, experts.clamped)
        return F.linear(inner, experts.down[expert], out_bias)

    def rotate_and_store(
        self, qkv: torch.Tensor, heads: Heads, layer: int, context: Context
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        qkv = qkv.view(-1, heads.query + 2 * heads.kv, heads.dim)
        qk, v = torch.split_with_sizes(qkv, (heads.query + heads.kv, heads.kv), 1)
        if heads.norm is not None:
            qk = self._norm_heads(qk, heads, heads.norm)
        qk = rotate(qk, context.cos[heads.rope], context.sin[heads.rope])
        q, k = torch.split_with_sizes(qk, (heads.query, heads.kv), 1)
        context.attention.pool.store(layer, context.slots, k, v)
        return q, k, v

    def _norm_heads(self, qk: torch.Tensor, heads: Heads, weight: torch.Tensor) -> torch.Tensor:
        if not heads.norm_over_heads:
            return torch.rms_norm(qk.to(weight.dtype), (heads.dim,), eps=heads.eps).mul_(weight).to(qk.dtype)
        parts = zip(*(x.split((heads.query, heads.kv), dim=-2) for x in (qk, weight)), strict=True)
        normed = [self.norm(x.flatten(1), w.flatten(), heads.eps).view_as(x) for x, w in parts]
        return torch.cat(normed, dim=1)

    def stored_finite(self, context: Context) -> torch.Tensor:
        return context.attention.pool.are_finite(context.slots)

    def forbid(self, logits: torch.Tensor, masks: torch.Tensor) -> None:
        places = torch.arange(32, dtype=torch.int32, device=masks.device)
        bits = masks[:, :, None].bitwise_right_shift(places).bitwise_and_(1).flatten(1)
        logits.masked_fill_(bits[:, : logits.shape[1]] == 0, float("-inf"))


@functools.cache
def _root(x: float) -> torch.Tensor:
    return torch.tensor(math.sqrt(x))


def _clamped_gate(gate_up: torch.Tensor, clamped: ClampedGate) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=clamped.limit), up.clamp(-clamped.limit, clamped.limit)
    return (up + 1) * gate * torch.sigmoid(clamped.alpha * gate)
