"""Decode in one kernel of our own, for CUDA: every processor gets the same share of all cached tokens.

The blocks of all sequences, one after another, are cut into equal shares whatever the sequences' lengths; a share that
ends in the middle of a sequence leaves a partial result, and a second kernel puts those together: the idea of stream-K
(https://arxiv.org/abs/2301.03598), for attention "lean attention" (https://arxiv.org/abs/2405.10480). Nothing is
planned on the host but where each sequence begins, so a captured step needs two small arrays, and no workspace that
depends on lengths.

Where layers have windows, a sequence has the blocks in which the window's tokens are (or what there is of the newest
token's chunk), and begins elsewhere in layers with another window: one row of beginnings for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton

from treeline_runtime.attention.base import AttentionBackend, Layout
from treeline_runtime.ops import attention_kernels as kernels
from treeline_runtime.transfer import pinned, upload

_LOG2_E = 1.4426950408889634
LARGEST_BLOCK = 128
"""Tokens that are attended at once, where there is room for their keys and values."""
LARGEST_BLOCK_BYTES = 64 << 10
"""Of keys and values at once: three programs fit in the shared memory of a processor. With 16-bit heads of up to 128
that is the largest block, with heads of 256 (Gemma) half of it."""
_SHARES_OF_A_PROCESSOR = 3
"""As many as it runs at once."""
_SHARES_OF_WIDE_HEADS = 2
"""The same for heads beyond 128, of which registers hold the output of no more."""
_SPARE_BYTES = 25 << 10
"""Of shared memory, for everything but keys and values."""


@dataclass(frozen=True, slots=True, eq=False)
class _Buffers:
    """What the kernels of a step read and write besides the pool. A captured graph knows where it lies."""

    rows: torch.Tensor
    lens: torch.Tensor
    """(windows, 2 x sequences + 1) int32: where each sequence's blocks begin, and their end; then its tokens."""
    partial: torch.Tensor
    """(shares + sequences, heads, head_dim): one for each share, and one more wherever it holds another sequence."""
    scores: torch.Tensor
    """(shares + sequences, heads)"""


class Decode(AttentionBackend):
    """Steps of one new token each; all others are left to another backend of the same pool."""

    def __init__(self, others: AttentionBackend) -> None:
        super().__init__(others.pool, others.num_heads, others.num_kv_heads, others.head_dim, others.scoring)
        self._others = others
        self._windows = self.scoring.kinds
        self._device = self.pool.keys[0].device
        processors, shared_bytes = 1, 1 << 20
        if self._device.type == "cuda":
            properties = torch.cuda.get_device_properties(self._device)
            processors, shared_bytes = properties.multi_processor_count, properties.shared_memory_per_block_optin
        at_once = _SHARES_OF_A_PROCESSOR if self.head_dim <= 128 else _SHARES_OF_WIDE_HEADS
        self._shares = max(1, at_once * processors // self.num_kv_heads)
        # converting fp8 takes registers: with 128 tokens 255 of them on sm_90, so that two programs fit and not three;
        # with wide heads 64 are too many, where a window is looked at
        self._block = LARGEST_BLOCK
        if self.pool.is_fp8:
            self._block //= 2 if self.head_dim <= 128 else 4
        token_bytes = 2 * max(16, triton.next_power_of_2(self.head_dim)) * self.pool.keys[0].element_size()
        room = min(LARGEST_BLOCK_BYTES, shared_bytes - _SPARE_BYTES)
        while self._block > 16 and self._block * token_bytes > room:
            self._block //= 2
        self._partial = torch.empty(0, device=self._device)
        self._scores = torch.empty(0, device=self._device)

    def capture_buffers(self, sequences: int) -> _Buffers:
        rows = torch.empty(sequences, dtype=torch.int32, device=self._device)
        shape = (len(self._windows), 2 * sequences + 1)
        return self._buffers(rows, torch.empty(shape, dtype=torch.int32, device=self._device))

    def _buffers(self, rows: torch.Tensor, lens: torch.Tensor) -> _Buffers:
        """With room for partial results; steps share it, as the stream runs one after another."""
        shape = (self._shares + len(rows), self.num_heads, self.head_dim)
        if len(self._partial) < shape[0]:
            self._partial = torch.empty(shape, dtype=torch.float32, device=self._device)
            self._scores = torch.empty(shape[:2], dtype=torch.float32, device=self._device)
        return _Buffers(rows, lens, self._partial, self._scores)

    def plan(self, layout: Layout, buffers: _Buffers | None = None) -> Any:
        if buffers is None and any(q_len != 1 for q_len in layout.q_lens):
            return self._others.plan(layout)
        sequences = len(layout.q_lens)
        lens = np.zeros((len(self._windows), 2 * sequences + 1), dtype=np.int32)
        lens[:, sequences + 1 :] = layout.kv_lens
        for row, window in zip(lens, self._windows, strict=True):
            tokens = row[sequences + 1 :]
            np.cumsum(-(-tokens // self._block) - self._unseen(tokens, window), out=row[1 : sequences + 1])
        if buffers is None:
            return _Step(layout.page_table, self._buffers(layout.rows, upload(lens, self._device)))
        buffers.lens.copy_(pinned(lens, self._device), non_blocking=True)
        buffers.rows.copy_(layout.rows)
        return _Step(layout.page_table, buffers)

    def _unseen(self, tokens: npt.NDArray[np.int32], window: int | None) -> npt.NDArray[np.int32]:
        """tokens: of each sequence → blocks before that of the oldest token that its newest sees; see `oldest_of`."""
        if window is None:
            return np.zeros_like(tokens)
        oldest = (tokens - 1) // window * window if self.scoring.chunked else np.maximum(tokens - window, 0)
        return oldest // self._block

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: Any,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not isinstance(plan, _Step):
            return self._others.forward(layer, q, k, v, plan, sinks, out)
        sequences, step = q.shape[0], plan.buffers
        if out is None:
            out = torch.empty(sequences, self.num_heads * self.head_dim, dtype=q.dtype, device=q.device)
        group = self.num_heads // self.num_kv_heads
        window, cap = self.scoring.window(layer), self.scoring.softcap
        lens, key_scale = step.lens[self._windows.index(window)], self.pool.key_scales[layer]
        kernels.decode_shares[(self.num_kv_heads, self._shares)](
            q,
            self.pool.keys[layer],
            self.pool.values[layer],
            plan.page_table,
            step.rows,
            lens,
            step.partial,
            step.scores,
            key_scale * (self.scale * _LOG2_E if cap is None else 2 * self.scale / cap),
            self.pool.value_scales[layer],
            0.0 if cap is None else cap * _LOG2_E,
            plan.page_table.shape[1],
            sequences,
            KV=self.num_kv_heads,
            GROUP=group,
            DIM=self.head_dim,
            PAGE=self.pool.page_size,
            SHARES=self._shares,
            WINDOW=window or 0,
            CHUNKED=self.scoring.chunked,
            CAPPED=cap is not None,
            BLOCK=self._block,
            BLOCK_GROUP=max(16, triton.next_power_of_2(group)),
            BLOCK_DIM=max(16, triton.next_power_of_2(self.head_dim)),
            num_warps=4,
            num_stages=3,
        )
        kernels.merge_shares[(sequences, self.num_heads)](
            step.partial,
            step.scores,
            lens,
            out if sinks is None else sinks,
            out,
            sequences,
            HEADS=self.num_heads,
            DIM=self.head_dim,
            SHARES=self._shares,
            SINKS=sinks is not None,
            BLOCK_DIM=triton.next_power_of_2(self.head_dim),
            num_warps=1,
        )
        return out


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    page_table: torch.Tensor
    buffers: _Buffers
