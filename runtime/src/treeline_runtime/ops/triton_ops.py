"""The operations as Triton kernels. Arithmetic is float32; what is stored has the model's dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton

from treeline_runtime.core import Context
from treeline_runtime.ops import kernels
from treeline_runtime.ops.base import Heads

_GATE_BLOCK = 1024
_HEADS_AT_ONCE = 8
_OUTPUTS_AT_ONCE = 4
_FEW_OUTPUTS = 4096
VOCAB_BLOCK = 4096
"""Tokens of the vocabulary that one program looks at; a second kernel takes the best of the programs."""


class TritonOps:
    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """One token alone takes a kernel that only streams the weights, which cuBLAS does more slowly."""
        size, inputs = weight.shape
        block = 1024 if size > _FEW_OUTPUTS else 512
        if x.shape[0] != 1 or size % _OUTPUTS_AT_ONCE or inputs % block:
            return F.linear(x, weight, bias)
        out = torch.empty(1, size, dtype=x.dtype, device=x.device)
        kernels.matrix_times_vector[(size // _OUTPUTS_AT_ONCE,)](
            x,
            weight,
            weight if bias is None else bias,
            out,
            inputs,
            BIAS=bias is not None,
            OUTPUTS=_OUTPUTS_AT_ONCE,
            BLOCK=block,
            num_warps=4,
        )
        return out

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._norm(x, x, weight, eps, add=False)

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._norm(x, residual, weight, eps, add=True), residual

    def _norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, add: bool
    ) -> torch.Tensor:
        rows, size = x.shape
        out = torch.empty_like(x)
        block = triton.next_power_of_2(size)
        kernels.norm[(rows,)](
            x, residual, weight, out, size, eps, ADD=add, BLOCK=block, num_warps=min(max(block // 512, 1), 16)
        )
        return out

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
        kernels.gate[(rows, triton.cdiv(size, _GATE_BLOCK))](gate_up, out, size, BLOCK=_GATE_BLOCK, num_warps=4)
        return out

    def rotate_and_store(
        self, qkv: torch.Tensor, heads: Heads, layer: int, context: Context
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens = qkv.shape[0]
        qkv = qkv.view(tokens, heads.query + 2 * heads.kv, heads.dim)
        q = torch.empty(tokens, heads.query, heads.dim, dtype=qkv.dtype, device=qkv.device)
        pool = context.attention.pool
        keys, values = pool.keys[layer], pool.values[layer]
        assert context.unfinite is not None
        kernels.rotate_and_store[(tokens, triton.cdiv(heads.query + 2 * heads.kv, _HEADS_AT_ONCE))](
            qkv,
            q,
            keys,
            values,
            context.slots,
            context.cos,
            context.sin,
            qkv if heads.norm is None else heads.norm,
            context.unfinite,
            heads.eps,
            pool.key_scales[layer],
            pool.value_scales[layer],
            QUERY=heads.query,
            KV=heads.kv,
            HALF=heads.dim // 2,
            BLOCK_HALF=triton.next_power_of_2(heads.dim // 2),
            NORM=heads.norm is not None,
            FP8=pool.is_fp8,
            BLOCK=_HEADS_AT_ONCE,
            num_warps=4,
        )
        return q, qkv[:, heads.query : heads.query + heads.kv], qkv[:, heads.query + heads.kv :]

    def stored_finite(self, context: Context) -> torch.Tensor:
        assert context.unfinite is not None
        return context.unfinite == 0

    def choose(
        self, logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, vocab = logits.shape
        device = logits.device
        blocks = triton.cdiv(vocab, VOCAB_BLOCK)
        scores = torch.empty(rows, blocks, dtype=torch.float32, device=device)
        best = torch.empty(rows, blocks, dtype=torch.int32, device=device)
        tokens = torch.empty(rows, dtype=torch.int64, device=device)
        finite = torch.empty(rows, dtype=torch.bool, device=device)
        kernels.best_of_block[(rows, blocks)](
            logits, temperatures, keys, scores, best, vocab, blocks, BLOCK=VOCAB_BLOCK, num_warps=8
        )
        kernels.best_of_blocks[(rows,)](
            scores, best, tokens, finite, blocks, BLOCK=triton.next_power_of_2(blocks), num_warps=1
        )
        return tokens, finite
