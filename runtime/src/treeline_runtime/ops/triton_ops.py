"""The operations as Triton kernels. Arithmetic is float32; results have the model's dtype."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import triton

from treeline_runtime.context import Context
from treeline_runtime.ops import expert_kernels, kernels
from treeline_runtime.ops.base import Activation, Found, Heads, Tables
from treeline_runtime.ops.early_kernels import early_launch
from treeline_runtime.ops.fused_experts import FusedExperts

_GATE_BLOCK = 1024
_CAP_BLOCK = 2048
_HEADS_AT_ONCE = 8
VOCAB_BLOCK = 4096
"""Tokens of the vocabulary per program; a second kernel takes the best of all."""


class TritonOps:
    def __init__(self, device: torch.device | None = None) -> None:
        """device: of the tensors, to use features of some GPUs only."""
        self._early = early_launch(device)
        self.experts = FusedExperts()

    def look_up(self, rows: torch.Tensor, positions: torch.Tensor, tables: Tables) -> Found:
        tokens, (ropes, length, size) = len(rows), tables.cos.shape
        # each by itself: kernels are compiled for where a tensor begins
        ids, slots = (torch.empty(tokens, dtype=torch.int64, device=rows.device) for _ in range(2))
        angles = ropes, tokens, 1, size
        cos, sin = (torch.empty(angles, dtype=tables.cos.dtype, device=rows.device) for _ in range(2))
        unfinite = torch.empty(tokens, dtype=torch.int32, device=rows.device)
        kernels.look_up[(tokens,)](
            rows, positions, tables.tokens, tables.pages, tables.cos, tables.sin,
            tables.pages if tables.deltas is None else tables.deltas, ids, slots, cos, sin, unfinite,
            tables.tokens.stride(0), tables.pages.stride(0), length,
            DELTAS=tables.deltas is not None,
            PAGE=tables.page_size, ROPES=ropes, SIZE=size, BLOCK=triton.next_power_of_2(size), num_warps=1,
            **self._early,
        )  # fmt: skip
        return Found(ids, slots, cos, sin, unfinite)

    def put(self, ids: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> None:
        kernels.put[(len(ids),)](ids, tokens, rows, positions, tokens.stride(0), num_warps=1, **self._early)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.shape[0] != 1:
            return F.linear(x, weight, bias)
        return self.linear_into(x.new_empty(1, len(weight)), x, weight, bias)

    def linear_into(
        self, room: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """A single token uses a kernel that only streams the weights, faster than cuBLAS."""
        size, inputs = weight.shape
        # measured on an H200: a long row by itself, in pieces as large as fit; short ones some at once
        outputs, block = (1, math.gcd(inputs, 2048)) if inputs > 1024 else (4, 512)
        if x.shape[0] != 1 or size % outputs or inputs % block or block < 512:
            return torch.mm(x, weight.t(), out=room) if bias is None else torch.addmm(bias, x, weight.t(), out=room)
        kernels.matrix_times_vector[(size // outputs,)](
            x,
            weight,
            weight if bias is None else bias,
            room,
            inputs,
            BIAS=bias is not None,
            OUTPUTS=outputs,
            BLOCK=block,
            num_warps=4,
            **self._early,
        )
        return room

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        self._norm(x, out, eps, weight=weight)
        return out

    def add_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        after: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = residual if weight is None else torch.empty_like(x)
        self._norm(x, out, eps, weight=weight, residual=residual, after=after)
        return out, residual

    def _norm(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        eps: float,
        *,
        weight: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        after: torch.Tensor | None = None,
    ) -> None:
        """Rows of x and out have the same stride; they may be the same tensor."""
        rows, size = x.shape
        block = triton.next_power_of_2(size)
        kernels.norm[(rows,)](
            x,
            x if after is None else after,
            x if residual is None else residual,
            x if weight is None else weight,
            out,
            size,
            x.stride(0),
            eps,
            AFTER=after is not None,
            ADD=residual is not None,
            NORM=weight is not None,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
            **self._early,
        )

    def gate(self, gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
        kernels.gate[(rows, triton.cdiv(size, _GATE_BLOCK))](
            gate_up, out, size, GELU=activation == "gelu_tanh", BLOCK=_GATE_BLOCK, num_warps=4, **self._early
        )
        return out

    def softcap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        kernels.softcap[(triton.cdiv(x.numel(), _CAP_BLOCK),)](x, x.numel(), cap, BLOCK=_CAP_BLOCK, num_warps=4)
        return x

    def route(self, logits: torch.Tensor, top_k: int, *, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, experts = logits.shape
        scores = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
        ids = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
        expert_kernels.route[(tokens,)](
            logits, scores, ids, experts, TOP_K=top_k, NORMALISE=normalise,
            BLOCK=triton.next_power_of_2(experts), BLOCK_K=triton.next_power_of_2(top_k), num_warps=1,
        )  # fmt: skip
        return scores, ids

    def rotate_and_store(
        self, qkv: torch.Tensor, heads: Heads, layer: int, context: Context
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens = qkv.shape[0]
        qkv = qkv.view(tokens, heads.query + 2 * heads.kv, heads.dim)
        q = torch.empty(tokens, heads.query, heads.dim, dtype=qkv.dtype, device=qkv.device)
        pool = context.attention.pool
        keys, values = pool.keys[layer], pool.values[layer]
        assert context.unfinite is not None
        cos, sin = context.cos[heads.rope], context.sin[heads.rope]
        if heads.norm is not None and heads.norm_over_heads:
            for part in (slice(heads.query), slice(heads.query, heads.query + heads.kv)):
                x = qkv[:, part].flatten(1)  # a view: the heads of a token are contiguous
                self._norm(x, x, heads.eps, weight=heads.norm[part].flatten())
        each = None if heads.norm_over_heads else heads.norm
        kernels.rotate_and_store[(tokens, triton.cdiv(heads.query + 2 * heads.kv, _HEADS_AT_ONCE))](
            qkv,
            q,
            keys,
            values,
            context.slots,
            cos,
            sin,
            qkv if each is None else each,
            context.unfinite,
            heads.eps,
            pool.key_scales[layer],
            pool.value_scales[layer],
            QUERY=heads.query,
            KV=heads.kv,
            HALF=heads.dim // 2,
            PAIRS=cos.shape[-1] // 2,
            BLOCK_HALF=triton.next_power_of_2(heads.dim // 2),
            NORM=each is not None,
            FP8=pool.is_fp8,
            BLOCK=_HEADS_AT_ONCE,
            num_warps=4,
            **self._early,
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
            logits, temperatures, keys, scores, best, vocab, blocks, BLOCK=VOCAB_BLOCK, num_warps=8, **self._early
        )
        kernels.best_of_blocks[(rows,)](
            scores, best, tokens, finite, blocks, BLOCK=triton.next_power_of_2(blocks), num_warps=1, **self._early
        )
        return tokens, finite

    def forbid(self, logits: torch.Tensor, masks: torch.Tensor) -> None:
        rows, vocab = logits.shape
        blocks = triton.cdiv(vocab, VOCAB_BLOCK)
        kernels.forbid[(rows, blocks)](logits, masks, vocab, masks.shape[1], BLOCK=VOCAB_BLOCK, num_warps=8)
