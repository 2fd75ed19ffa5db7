"""Our own decode kernel for CUDA: every processor gets the same share of all cached tokens.

The blocks of all sequences, one after another, are cut into equal shares. A share that ends inside a sequence leaves a
partial result, and a second kernel merges these (stream-K, https://arxiv.org/abs/2301.03598; for attention "lean
attention", https://arxiv.org/abs/2405.10480). The host plans only where each sequence begins, so a captured step needs
two small arrays and no workspace that depends on lengths.

Matrix units want at least 16 rows in a tile of queries, more than one sequence fills. With shared prefixes, other
sequences fill the rest, and the prefix is read once for all. So the blocks are those of segments, each a shared prefix
or the rest of a sequence: `attention.segments`.

In layers with windows a sequence has only its window's blocks. Each window has its own row of segments, without shared
prefixes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton

from treeline_runtime.attention.base import AttentionBackend, HostPages, Layout, factors, processors_of
from treeline_runtime.attention.segments import Segments, shared_prefixes
from treeline_runtime.attention.torch_sdpa import TorchSDPA
from treeline_runtime.ops import attention_kernels as kernels
from treeline_runtime.ops.early_kernels import early_launch
from treeline_runtime.transfer import pinned, upload

LARGEST_BLOCK = 128
"""Tokens processed at once, if their keys and values fit."""
LARGEST_BLOCK_BYTES = 64 << 10
"""Bytes of keys and values at once: three programs fit into a processor's shared memory. For 16-bit heads of up to 128
this is the largest block, for heads of 256 (Gemma) half of it."""
_SHARES_OF_A_PROCESSOR = 3
"""Programs that a processor runs at once."""
_SHARES_OF_WIDE_HEADS = 2
"""The same for heads beyond 128, whose output needs more registers."""
_WARPS = 4
_REGISTERS_OF_A_PROCESSOR = 1 << 16
_SPARE_BYTES = 25 << 10
"""Shared memory for everything else than keys and values, in bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class _Buffers:
    """The tensors that a step's kernels use besides the pool, at fixed addresses for captured graphs."""

    rows: torch.Tensor
    segments: torch.Tensor
    """(windows, size) int32: a row per window, filled by `Segments.write`."""
    partial: torch.Tensor
    """(shares x most members + 2 x sequences, heads, head_dim): for each segment, a share has one result per member; a
    sequence is in at most two segments."""
    scores: torch.Tensor
    """(shares x most members + 2 x sequences, heads)"""
    shape: Segments
    """The layout of a row, for a number of sequences."""


class Decode(AttentionBackend):
    """Handles steps of one new token each; another backend of the same pool handles the rest."""

    def __init__(self, others: AttentionBackend) -> None:
        super().__init__(others.pool, others.num_heads, others.scoring)
        self._others = others
        self._masked = TorchSDPA(others.pool, others.num_heads, others.scoring)
        """For prompts with spans, of which the kernels know nothing."""
        self._windows = self.scoring.kinds
        self._device = self.pool.keys[0].device
        self._early = early_launch(self._device)
        processors, shared_bytes = processors_of(self._device)
        at_once = _SHARES_OF_A_PROCESSOR if self.head_dim <= 128 else _SHARES_OF_WIDE_HEADS
        self._shares = max(1, at_once * processors // self.num_kv_heads)
        self._registers = min(_REGISTERS_OF_A_PROCESSOR // (at_once * 32 * _WARPS) // 8 * 8, 255)
        self._limits: dict[str, int] = {}
        # converting fp8 takes registers: with 128 tokens 255 of them on sm_90, so that two programs fit and not three;
        # with wide heads 64 are too many, where a window is looked at
        self._block = LARGEST_BLOCK
        if self.pool.is_fp8:
            self._block //= 2 if self.head_dim <= 128 else 4
        token_bytes = 2 * max(16, triton.next_power_of_2(self.head_dim)) * self.pool.keys[0].element_size()
        room = min(LARGEST_BLOCK_BYTES, shared_bytes - _SPARE_BYTES)
        while self._block > 16 and self._block * token_bytes > room:
            self._block //= 2
        group = self.num_heads // self.num_kv_heads
        self._block_group = max(16, triton.next_power_of_2(group))
        self.sharers = self._block_group // group  # their queries are a tile
        self._alone = Segments(0, self._block)
        """Segments for the last number of sequences if none shares a prefix."""
        self._shared: tuple[Any, Segments] = None, self._alone
        """A key of the last batch, and its segments."""
        self._partial = torch.empty(0, device=self._device)
        self._scores = torch.empty(0, device=self._device)

    def capture_buffers(self, sequences: int) -> _Buffers:
        rows = torch.empty(sequences, dtype=torch.int32, device=self._device)
        shape = Segments(sequences, self._block)
        segments = torch.empty(len(self._windows), shape.size, dtype=torch.int32, device=self._device)
        return self._buffers(rows, segments, shape)

    def _buffers(self, rows: torch.Tensor, segments: torch.Tensor, shape: Segments) -> _Buffers:
        """Buffers with room for partial results, shared by all steps, since a stream runs them one after another."""
        cells = self._shares * self.sharers + 2 * len(rows)
        if len(self._partial) < cells:
            size = (cells, self.num_heads, self.head_dim)
            self._partial = torch.empty(size, dtype=torch.float32, device=self._device)
            self._scores = torch.empty(size[:2], dtype=torch.float32, device=self._device)
        return _Buffers(rows, segments, self._partial, self._scores, shape)

    def plan(self, layout: Layout, buffers: _Buffers | None = None) -> Any:
        if buffers is None and any(q_len != 1 for q_len in layout.q_lens):
            others = self._masked if layout.spans else self._others
            return others, others.plan(layout)
        kv_lens = np.array(layout.kv_lens)
        if self._alone.sequences != len(kv_lens):
            self._alone = Segments(len(kv_lens), self._block)
        shared = self._sharing(layout.host, kv_lens) if None in self._windows else self._alone
        segments = np.empty((len(self._windows), shared.size), dtype=np.int32)
        for row, window in zip(segments, self._windows, strict=True):
            (shared if window is None else self._alone).write(row, kv_lens, self._shares, window)
        if buffers is None:
            return _Step(layout.page_table, self._buffers(layout.rows, upload(segments, self._device), shared))
        buffers.segments.copy_(pinned(segments, self._device), non_blocking=True)
        buffers.rows.copy_(layout.rows)
        return _Step(layout.page_table, buffers)

    def _sharing(self, host: HostPages | None, kv_lens: npt.NDArray[np.int64]) -> Segments:
        """Computed again only when sequences come, go, or move to other pages; steps only append."""
        if host is None:
            return self._alone
        key = (len(kv_lens), host.version, host.rows)
        if key != self._shared[0]:
            prefixes = shared_prefixes(
                host.pages,
                host.rows,
                kv_lens[: len(host.rows)],
                page_size=self.pool.page_size,
                block=self._block,
                most=self.sharers,
            )
            segments = Segments(len(kv_lens), self._block, prefixes) if prefixes else self._alone
            self._shared = (*key[:2], host.rows[:]), segments
        return self._shared[1]

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
            others, planned = plan
            found: torch.Tensor = others.forward(layer, q, k, v, planned, sinks, out)
            return found
        sequences, step = q.shape[0], plan.buffers
        if out is None:
            out = torch.empty(sequences, self.num_heads * self.head_dim, dtype=q.dtype, device=q.device)
        segments = step.segments[self._windows.index(self.scoring.window(layer))]
        self._read(layer, q, plan, segments)
        kernels.merge_shares[(sequences, self.num_heads)](
            step.partial,
            step.scores,
            segments[step.shape.parts_at :],
            out if sinks is None else sinks,
            out,
            HEADS=self.num_heads,
            DIM=self.head_dim,
            SHARERS=self.sharers,
            SINKS=sinks is not None,
            BLOCK_DIM=triton.next_power_of_2(self.head_dim),
            num_warps=1,
            **self._early,
        )
        return out

    def _read(self, layer: int, q: torch.Tensor, plan: _Step, segments: torch.Tensor) -> None:
        """Writes the partial results of all shares. segments: those of the layer's window."""
        step = plan.buffers
        compiled = kernels.decode_shares[(self.num_kv_heads, self._shares)](
            q,
            self.pool.keys[layer],
            self.pool.values[layer],
            plan.page_table,
            step.rows,
            segments,
            segments[step.shape.members_at :],
            step.partial,
            step.scores,
            *factors(self, layer),
            plan.page_table.shape[1],
            step.shape.most,
            KV=self.num_kv_heads,
            GROUP=self.num_heads // self.num_kv_heads,
            DIM=self.head_dim,
            PAGE=self.pool.page_size,
            SHARES=self._shares,
            WINDOW=self.scoring.window(layer) or 0,
            CAPPED=self.scoring.softcap is not None,
            BLOCK=self._block,
            BLOCK_GROUP=self._block_group,
            BLOCK_DIM=max(16, triton.next_power_of_2(self.head_dim)),
            num_warps=_WARPS,
            num_stages=3,
            **self._limits,
            **self._early,
        )
        if not self._limits and getattr(compiled, "n_regs", 0) > self._registers:
            # Triton 3.6 takes so many that fewer programs run at once: then rather a few in memory (3.9 does not, and
            # with a limit would do worse)
            self._limits["maxnreg"] = self._registers
            self._read(layer, q, plan, segments)  # compiled at once, and not within a capture


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    page_table: torch.Tensor
    buffers: _Buffers
