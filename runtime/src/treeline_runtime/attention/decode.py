"""Decode in one kernel of our own, for CUDA: every processor gets the same share of all cached tokens.

The blocks of all sequences, one after another, are cut into equal shares whatever the sequences' lengths; a share that
ends in the middle of a sequence leaves a partial result, and a second kernel puts those together: the idea of stream-K
(https://arxiv.org/abs/2301.03598), for attention "lean attention" (https://arxiv.org/abs/2405.10480). Nothing is
planned on the host but where each sequence begins, so a captured step needs two small arrays, and no workspace that
depends on lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton

from treeline_runtime.attention.base import AttentionBackend, Layout
from treeline_runtime.ops import kernels
from treeline_runtime.transfer import upload

_LOG2_E = 1.4426950408889634
BLOCK = 128
"""Tokens that are attended at once."""
_SHARES_OF_A_PROCESSOR = 3
"""As many as it runs at once."""


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    rows: torch.Tensor
    lens: torch.Tensor
    """(2 x sequences + 1,) int32: where each sequence's blocks begin, and their end; then its tokens."""


class Decode(AttentionBackend):
    """Steps of one new token each; all others are left to another backend of the same pool."""

    def __init__(self, others: AttentionBackend) -> None:
        super().__init__(others.pool, others.num_heads, others.num_kv_heads, others.head_dim)
        self._others = others
        self._device = self.pool.keys[0].device
        processors = 1
        if self._device.type == "cuda":
            processors = torch.cuda.get_device_properties(self._device).multi_processor_count
        self._shares = max(1, _SHARES_OF_A_PROCESSOR * processors // self.num_kv_heads)
        self._partial = torch.empty(0, device=self._device)
        self._scores = torch.empty(0, device=self._device)

    def capture_buffers(self, sequences: int) -> _Plan:
        self._reserve(sequences)
        rows = torch.empty(sequences, dtype=torch.int32, device=self._device)
        lens = torch.empty(2 * sequences + 1, dtype=torch.int32, device=self._device)
        return _Plan(rows, lens)

    def plan(self, layout: Layout, buffers: _Plan | None = None) -> Any:
        sequences = len(layout.q_lens)
        if buffers is None and any(q_len != 1 for q_len in layout.q_lens):
            return self._others.plan(layout)
        lens = np.zeros(2 * sequences + 1, dtype=np.int32)
        lens[sequences + 1 :] = layout.kv_lens
        np.cumsum(-(-lens[sequences + 1 :] // BLOCK), out=lens[1 : sequences + 1])
        if buffers is None:
            self._reserve(sequences)
            return _Decode(layout.page_table, _Plan(layout.rows, upload(lens, self._device)))
        buffers.lens.copy_(torch.from_numpy(lens), non_blocking=True)
        buffers.rows.copy_(layout.rows)
        return _Decode(layout.page_table, buffers)

    def _reserve(self, sequences: int) -> None:
        """Room for the partial results: one for each share, and one more wherever a share holds another sequence."""
        shape = (self._shares + sequences, self.num_heads, self.head_dim)
        if len(self._partial) < shape[0]:
            self._partial = torch.empty(shape, dtype=torch.float32, device=self._device)
            self._scores = torch.empty(shape[:2], dtype=torch.float32, device=self._device)

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Any) -> torch.Tensor:
        if not isinstance(plan, _Decode):
            return self._others.forward(layer, q, k, v, plan)
        sequences, step = q.shape[0], plan.step
        out = torch.empty(sequences, self.num_heads * self.head_dim, dtype=q.dtype, device=q.device)
        group = self.num_heads // self.num_kv_heads
        kernels.decode_shares[(self.num_kv_heads, self._shares)](
            q,
            self.pool.keys[layer],
            self.pool.values[layer],
            plan.page_table,
            step.rows,
            step.lens,
            self._partial,
            self._scores,
            self.scale * _LOG2_E,
            plan.page_table.shape[1],
            sequences,
            KV=self.num_kv_heads,
            GROUP=group,
            DIM=self.head_dim,
            PAGE=self.pool.page_size,
            SHARES=self._shares,
            BLOCK=BLOCK,
            BLOCK_GROUP=max(16, triton.next_power_of_2(group)),
            BLOCK_DIM=max(16, triton.next_power_of_2(self.head_dim)),
            num_warps=4,
            num_stages=3,
        )
        kernels.merge_shares[(sequences, self.num_heads)](
            self._partial,
            self._scores,
            step.lens,
            out,
            sequences,
            HEADS=self.num_heads,
            DIM=self.head_dim,
            SHARES=self._shares,
            BLOCK_DIM=triton.next_power_of_2(self.head_dim),
            num_warps=1,
        )
        return out


@dataclass(frozen=True, slots=True, eq=False)
class _Decode:
    page_table: torch.Tensor
    step: _Plan
