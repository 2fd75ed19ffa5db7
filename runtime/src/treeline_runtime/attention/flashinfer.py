"""Attention with FlashInfer's paged kernels, for CUDA. https://github.com/flashinfer-ai/flashinfer

Prompts take the FlashAttention 3 template on Hopper and FlashAttention 2 elsewhere. Decode takes the tensor-core kernel
where several query heads share a KV head (4.0 TB/s instead of 2.7 on an H200 with groups of 4).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import torch
import triton
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
from flashinfer.decode import fast_decode_plan

from treeline_runtime.attention.base import AttentionBackend, Layout
from treeline_runtime.kvcache.pool import KVPool
from treeline_runtime.ops import kernels
from treeline_runtime.transfer import upload

logger = logging.getLogger(__name__)

WORKSPACE_BYTES = 384 << 20
"""For partial results of long sequences that several processors share."""
TENSOR_CORE_GROUP = 4
"""Query heads of a KV head from which the tensor-core kernel is faster in decode."""
_PAGES_AT_ONCE = 1024
_PLANS_IN_FLIGHT = 4
"""A plan lies in pinned memory until the device has copied it: launched steps, the one being planned, one to spare."""


@dataclass(slots=True, eq=False)
class _Buffers:
    """Of one captured number of sequences."""

    wrapper: Any
    lens: torch.Tensor
    """(2 x sequences + 1,) int32: indptr of the pages, then the tokens in each last page."""
    planned: bool = False


class FlashInfer(AttentionBackend):
    """One workspace and one list of pages for all wrappers: the stream runs one step after the other."""

    def __init__(self, pool: KVPool, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__(pool, num_heads, num_kv_heads, head_dim)
        device = pool.keys[0].device
        self._device = device
        self._dtype = pool.keys[0].dtype
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._tensor_cores = num_heads // num_kv_heads >= TENSOR_CORE_GROUP
        self._prefill = BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend=_prefill_kernel(device))
        self._decode = BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_tensor_cores=self._tensor_cores, backend="fa2" if self._tensor_cores else "auto"
        )
        self._pages: torch.Tensor | None = None
        self._int_workspace = self._decode._int_workspace_buffer
        self._pinned: Iterator[torch.Tensor] = cycle(
            torch.empty_like(self._int_workspace, device="cpu", pin_memory=True) for _ in range(_PLANS_IN_FLIGHT)
        )

    def capture_buffers(self, sequences: int, max_pages: int) -> _Buffers | None:
        if self._pages is None or len(self._pages) < max_pages:
            self._pages = torch.empty(max_pages, dtype=torch.int32, device=self._device)
        lens = torch.empty(2 * sequences + 1, dtype=torch.int32, device=self._device)
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=self._tensor_cores,
            paged_kv_indptr_buffer=lens[: sequences + 1],
            paged_kv_indices_buffer=self._pages,
            paged_kv_last_page_len_buffer=lens[sequences + 1 :],
            backend="fa2" if self._tensor_cores else "auto",
        )
        wrapper._int_workspace_buffer = self._int_workspace
        return _Buffers(wrapper, lens)

    def plan(self, layout: Layout, buffers: _Buffers | None = None) -> Any:
        page_size = self.pool.page_size
        kv_lens = np.asarray(layout.kv_lens, dtype=np.int32)
        counts = -(-kv_lens // page_size)
        sequences = len(kv_lens)
        lens = np.zeros(2 * sequences + 1, dtype=np.int32)
        np.cumsum(counts, out=lens[1 : sequences + 1])
        lens[sequences + 1 :] = kv_lens - (counts - 1) * page_size
        host = torch.from_numpy(lens)
        indptr, last = host[: sequences + 1], host[sequences + 1 :]
        if buffers is not None:
            buffers.lens.copy_(host, non_blocking=True)
            pages, lens_there = self._pages, buffers.lens
        else:
            lens_there = upload(lens, self._device)
            pages = torch.empty(int(lens[sequences]), dtype=torch.int32, device=self._device)
        assert pages is not None
        kernels.flatten_pages[(sequences, triton.cdiv(int(counts.max()), _PAGES_AT_ONCE))](
            layout.page_table, layout.rows, lens_there, pages, layout.page_table.shape[1], BLOCK=_PAGES_AT_ONCE
        )
        if buffers is not None:
            return self._plan_captured(buffers, indptr, last)
        shape = (self.num_heads, self.num_kv_heads, self.head_dim, page_size)
        kinds = {"q_data_type": self._dtype, "kv_data_type": self._dtype}
        if all(q_len == 1 for q_len in layout.q_lens):
            self._decode._pin_memory_int_workspace_buffer = next(self._pinned)
            self._decode.plan(indptr, pages, last, *shape, sm_scale=self.scale, **kinds)
            return self._decode
        queries = torch.zeros(sequences + 1, dtype=torch.int32)
        torch.cumsum(torch.tensor(layout.q_lens), 0, out=queries[1:])
        self._prefill._pin_memory_int_workspace_buffer = next(self._pinned)
        self._prefill.plan(queries, indptr, pages, last, *shape, causal=True, sm_scale=self.scale, **kinds)
        return self._prefill

    def _plan_captured(self, buffers: _Buffers, indptr: torch.Tensor, last: torch.Tensor) -> Any:
        """What the graph reads besides the plan is in the buffers already."""
        wrapper = buffers.wrapper
        wrapper._pin_memory_int_workspace_buffer = next(self._pinned)
        args = (indptr, self._pages[:0], last, self.num_heads, self.num_kv_heads, self.head_dim, self.pool.page_size)  # type: ignore[index]
        kinds = {"q_data_type": self._dtype, "kv_data_type": self._dtype, "sm_scale": self.scale}
        if buffers.planned:
            fast_decode_plan(wrapper, *args, **kinds, global_override_indptr_cpu=indptr)
        else:
            wrapper.plan(*args, **kinds)
            buffers.planned = True
        return wrapper

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Any) -> torch.Tensor:
        out: torch.Tensor = plan.run(q, (self.pool.keys[layer], self.pool.values[layer]))
        return out.view(q.shape[0], self.num_heads * self.head_dim)


def _prefill_kernel(device: torch.device) -> str:
    return "fa3" if torch.cuda.get_device_capability(device) == (9, 0) else "fa2"
