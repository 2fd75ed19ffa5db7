"""Our own prompt kernel for CUDA, used without FlashInfer; needs no nvcc.

A program handles the queries of one KV head over a block of a sequence's new tokens, and walks the cached tokens page
by page, as FlashAttention does (https://arxiv.org/abs/2205.14135). A step with few new tokens would not fill all
processors; then keys are split, and a second kernel adds up the parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton

from treeline_runtime.attention.base import AttentionBackend, Layout, factors, processors_of
from treeline_runtime.kvcache.pool import KVPool
from treeline_runtime.models.model_config import PLAIN, Scoring
from treeline_runtime.ops import attention_kernels as kernels
from treeline_runtime.transfer import upload

ROWS = 128
"""Query rows of a program: new tokens x query heads of a KV head."""
LARGEST_BLOCK = 64
"""Tokens processed at once, if their keys and values fit into shared memory."""
_SPARE_BYTES = 8 << 10
_LEAST_SPLIT = 4
"""The fewest blocks of keys that are worth a part of their own."""


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    page_table: torch.Tensor
    rows: torch.Tensor
    lens: torch.Tensor
    """(2 x sequences + 1,) int32: start of each sequence's new tokens and their end; then their tokens."""
    blocks: torch.Tensor
    """(blocks, 2) int32: the sequence, and the index of its first new token."""
    splits: dict[int | None, int]
    """Parts of each block's keys, per window."""


class Extend(AttentionBackend):
    """Handles any step, but is meant for prompts: `attention.decode` is faster for single new tokens."""

    def __init__(self, pool: KVPool, num_heads: int, scoring: Scoring = PLAIN) -> None:
        super().__init__(pool, num_heads, scoring)
        self._device = pool.keys[0].device
        processors, shared_bytes = processors_of(self._device)
        group = num_heads // self.num_kv_heads
        self._block_dim = max(16, triton.next_power_of_2(self.head_dim))
        self._narrower = max(1, self._block_dim // (128 if pool.dtype.itemsize < 4 else 32))
        """Wider heads take more registers, and float32, which tensor cores do not multiply, far more: fewer rows and
        tokens at once make up for it."""
        self._block_rows = max(ROWS // self._narrower, triton.next_power_of_2(group))
        self._tokens = self._block_rows // group
        self._block, self._stages = self._largest(shared_bytes - _SPARE_BYTES, pool.dtype.itemsize)
        self._programs = 2 * processors
        """Programs that run at once; if a step has fewer, keys are split."""
        parts = self._programs // self.num_kv_heads * self._tokens
        self._partial = torch.empty(parts, num_heads, self.head_dim, dtype=torch.float32, device=self._device)
        self._scores = torch.empty(parts, num_heads, dtype=torch.float32, device=self._device)

    def _largest(self, room_bytes: int, element_size: int) -> tuple[int, int]:
        """The largest (block, pipeline stages) that fit into shared memory beside the queries."""
        room_tokens = room_bytes // (element_size * self._block_dim)
        largest = max(16, LARGEST_BLOCK // self._narrower)
        for block in (largest, max(16, largest // 2)):
            for stages in (3, 2):
                if self._block_rows + 2 * stages * block <= room_tokens:
                    return block, stages
        return 16, 1

    def plan(self, layout: Layout, buffers: None = None) -> _Step:
        assert buffers is None, "this backend has no buffers to plan into"
        q_lens = np.asarray(layout.q_lens, dtype=np.int32)
        lens = np.zeros(2 * len(q_lens) + 1, dtype=np.int32)
        np.cumsum(q_lens, out=lens[1 : len(q_lens) + 1])
        lens[len(q_lens) + 1 :] = layout.kv_lens
        counts = -(-q_lens // self._tokens)
        blocks = np.empty((int(counts.sum()), 2), dtype=np.int32)
        blocks[:, 0] = np.repeat(np.arange(len(q_lens), dtype=np.int32), counts)
        within = np.arange(len(blocks)) - np.repeat(np.cumsum(counts) - counts, counts)
        blocks[:, 1] = within * self._tokens
        # the longest first: what begins last should not end last
        keys = np.asarray(layout.kv_lens)[blocks[:, 0]] - q_lens[blocks[:, 0]] + blocks[:, 1]
        blocks = blocks[np.argsort(-keys, kind="stable")]
        device = self._device
        longest = max(layout.kv_lens)
        splits = {
            window: self._splits(
                len(blocks), int(lens[len(q_lens)]), longest if window is None else min(longest, window + self._tokens)
            )
            for window in self.scoring.kinds
        }
        return _Step(layout.page_table, layout.rows, upload(lens, device), upload(blocks, device), splits)

    def _splits(self, blocks: int, tokens: int, longest: int) -> int:
        """Parts of each block's keys: as many as pay and as there is room for."""
        wanted = self._programs // (blocks * self.num_kv_heads)
        worth = -(-longest // (self._block * _LEAST_SPLIT))
        return max(1, min(wanted, worth, len(self._partial) // tokens))

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: _Step,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        window = self.scoring.window(layer)
        tokens, splits, split = len(q), plan.splits[window], plan.splits[window] > 1
        if out is None:
            out = torch.empty(tokens, self.num_heads * self.head_dim, dtype=q.dtype, device=q.device)
        kernels.extend[(self.num_kv_heads, len(plan.blocks), splits)](
            q,
            self.pool.keys[layer],
            self.pool.values[layer],
            plan.page_table,
            plan.rows,
            plan.lens,
            plan.blocks,
            self._partial if split else out,
            self._scores,
            out if sinks is None else sinks,
            *factors(self, layer),
            plan.page_table.shape[1],
            len(plan.rows),
            tokens,
            splits,
            KV=self.num_kv_heads,
            GROUP=self.num_heads // self.num_kv_heads,
            DIM=self.head_dim,
            PAGE=self.pool.page_size,
            TOKENS=self._tokens,
            SPLIT=split,
            WINDOW=window or 0,
            CAPPED=self.scoring.softcap is not None,
            SINKS=sinks is not None,
            BLOCK_ROWS=self._block_rows,
            BLOCK=self._block,
            BLOCK_DIM=self._block_dim,
            num_warps=8,
            num_stages=self._stages,
        )
        if split:
            self._merge(out, splits, sinks)
        return out

    def _merge(self, out: torch.Tensor, splits: int, sinks: torch.Tensor | None) -> None:
        heads = len(out) * self.num_heads
        kernels.merge_splits[(heads,)](
            self._partial,
            self._scores,
            out if sinks is None else sinks,
            out,
            heads,
            splits,
            HEADS=self.num_heads,
            DIM=self.head_dim,
            SINKS=sinks is not None,
            BLOCK_DIM=triton.next_power_of_2(self.head_dim),
            num_warps=1,
        )
