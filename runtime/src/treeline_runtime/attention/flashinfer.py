"""Prompts with FlashInfer's paged kernels, for CUDA. https://github.com/flashinfer-ai/flashinfer

FlashAttention 3 on Hopper, FlashAttention 2 elsewhere and for fp8 caches.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import numpy as np
import torch
import triton
from flashinfer import BatchPrefillWithPagedKVCacheWrapper

from treeline_runtime.attention.base import AttentionBackend, Layout
from treeline_runtime.kvcache.pool import KVPool
from treeline_runtime.models.model_config import PLAIN, Scoring
from treeline_runtime.ops import attention_kernels as kernels
from treeline_runtime.transfer import upload

logger = logging.getLogger(__name__)

WORKSPACE_BYTES = 384 << 20
"""Workspace for partial results of long sequences split between processors."""
_PAGES_AT_ONCE = 1024
_PLANS_IN_FLIGHT = 4
"""Pinned plans must live until the device has copied them. With this many, waiting happens only after failures."""


class _Wrapper:
    """FlashInfer's plan and kernels for one window (None: without)."""

    def __init__(self, workspace: torch.Tensor, window: int | None, *, is_fp8: bool) -> None:
        # FlashInfer's FlashAttention 3 reads fp8 only for queries that are fp8 too
        hopper = torch.cuda.get_device_capability(workspace.device) == (9, 0) and not is_fp8
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa3" if hopper else "fa2")
        self.run = self._wrapper.run
        self._window_left = -1 if window is None else window - 1  # the token itself is not counted
        pinned = self._wrapper._pin_memory_int_workspace_buffer
        self._pinned: Iterator[tuple[torch.Tensor, torch.cuda.Event]] = cycle(
            [(torch.empty_like(pinned, pin_memory=True), torch.cuda.Event()) for _ in range(_PLANS_IN_FLIGHT)]
        )

    def plan(self, *arguments: Any, **options: Any) -> None:
        # the wrapper would use one pinned buffer for all, from which the plan before may not have been copied yet
        self._wrapper._pin_memory_int_workspace_buffer, copied = next(self._pinned)
        copied.synchronize()
        self._wrapper.plan(*arguments, window_left=self._window_left, **options)
        copied.record()


class FlashInfer(AttentionBackend):
    """Handles any step, but is meant for prompts: `attention.decode` is faster for single new tokens."""

    def __init__(self, pool: KVPool, num_heads: int, scoring: Scoring = PLAIN) -> None:
        super().__init__(pool, num_heads, scoring)
        self._device = pool.keys[0].device
        self._dtype, self._stored = pool.dtype, pool.keys[0].dtype
        # layers run one after another: one workspace is enough
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        self._wrappers = {window: _Wrapper(workspace, window, is_fp8=pool.is_fp8) for window in scoring.kinds}
        self._compile()

    def _compile(self) -> None:
        """Runs a step to compile the kernels before requests need them."""
        logger.info("loading FlashInfer's attention kernels; if they have to be compiled, that takes a minute or two")
        started = time.perf_counter()
        zeros = torch.zeros(1, 1, dtype=torch.int64, device=self._device)
        q = torch.zeros(1, self.num_heads, self.head_dim, dtype=self._dtype, device=self._device)
        self.plan(Layout([1], [1], zeros, zeros[0]))
        for wrapper in self._wrappers.values():
            wrapper.run(q, (self.pool.keys[0], self.pool.values[0]))
        torch.cuda.synchronize(self._device)
        logger.info("FlashInfer's attention kernels are loaded: %.1f s", time.perf_counter() - started)

    def plan(self, layout: Layout, buffers: None = None) -> Any:
        assert buffers is None, "this backend has no buffers to plan into"
        page_size = self.pool.page_size
        kv_lens = np.asarray(layout.kv_lens, dtype=np.int32)
        counts = -(-kv_lens // page_size)
        indptr, queries = np.zeros((2, len(kv_lens) + 1), dtype=np.int32)
        np.cumsum(counts, out=indptr[1:])
        np.cumsum(layout.q_lens, out=queries[1:])
        pages = torch.empty(int(indptr[-1]), dtype=torch.int32, device=self._device)
        kernels.flatten_pages[(len(kv_lens), triton.cdiv(int(counts.max()), _PAGES_AT_ONCE))](
            layout.page_table,
            layout.rows,
            upload(indptr, self._device),
            pages,
            layout.page_table.shape[1],
            BLOCK=_PAGES_AT_ONCE,
        )
        last = kv_lens - (counts - 1) * page_size
        for wrapper in self._wrappers.values():
            wrapper.plan(
                torch.from_numpy(queries),
                torch.from_numpy(indptr),
                pages,
                torch.from_numpy(last),
                self.num_heads,
                self.num_kv_heads,
                self.head_dim,
                page_size,
                causal=True,
                sm_scale=self.scale,
                logits_soft_cap=self.scoring.softcap,
                q_data_type=self._dtype,
                kv_data_type=self._stored,
            )
        return self._wrappers

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
        assert sinks is None, "its kernels know no sinks"
        pool = self.pool
        scales = {"k_scale": pool.key_scales[layer], "v_scale": pool.value_scales[layer]} if pool.is_fp8 else {}
        if out is None:
            out = torch.empty(q.shape[0], self.num_heads * self.head_dim, dtype=q.dtype, device=q.device)
        wrapper = plan[self.scoring.window(layer)]
        wrapper.run(q, (pool.keys[layer], pool.values[layer]), out=out.view(q.shape), **scales)
        return out
