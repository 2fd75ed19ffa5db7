"""Prompt steps as CUDA graphs: launching a short step takes longer than computing it.

Decode steps are captured whole (`graphs.py`). Prompts have any lengths, and FlashInfer plans each step, so a step is
captured in pieces between attention calls, which depend only on the number of tokens. Attention runs between them on
the real tokens. A step uses the smallest size that holds it, padded with tokens of the scratch row.
"""

from __future__ import annotations

import functools
import logging
import time
from bisect import bisect_left
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from treeline_runtime.attention import AttentionBackend
from treeline_runtime.models.lora import AdapterStep
from treeline_runtime.scheduler.embeddings import StepMedia
from treeline_runtime.scheduler.forward import DeviceTables, Forward
from treeline_runtime.transfer import pinned, upload

logger = logging.getLogger(__name__)


def sizes_up_to(largest: int) -> list[int]:
    """Four per power of two from 64 on, every 16 below: at most a quarter is padding."""
    sizes: list[int] = []
    size = 0
    while size < largest:
        size = min(size + max(16, (1 << size.bit_length()) // 8), largest)
        sizes.append(size)
    return sizes


class _Memory:
    """A tensor's memory without the tensor, so that its maker may reuse it once it is read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": f"<i{size}",  # numpy has no bfloat16
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def _borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, without keeping the memory in the graphs' pool: pieces run in capture order, so the next user
    comes after this one."""
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The same stream after a sleep: cuBLAS keeps a workspace per stream it has used."""
    return torch.cuda.Stream(device)


@dataclass(frozen=True, slots=True, eq=False)
class _Attend:
    """An attention call between two pieces."""

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None
    out: torch.Tensor


class _Passing:
    """Replaces attention while kernels are compiled: its result is zero."""

    def __init__(self, attention: AttentionBackend) -> None:
        self.pool = attention.pool
        self._size = attention.num_heads * attention.head_dim

    def forward(self, layer: int, q: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.zeros(len(q), self._size, dtype=q.dtype, device=q.device)


class _Pieces:
    """Replaces attention during capture: a call ends one graph and begins the next.

    A capture is active inside. It always ends: until then the device refuses this thread's calls."""

    def __init__(self, attention: AttentionBackend, memory: Any) -> None:
        self.pool = attention.pool
        self._size = attention.num_heads * attention.head_dim
        self._memory = memory
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.calls: list[_Attend] = []
        self._open: torch.cuda.CUDAGraph | None = None

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if error is None:
            self._end()
        elif self._open is not None:
            with suppress(RuntimeError):  # the first error is raised
                self._end()

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        # an application around the engine may use the device in its own threads meanwhile
        graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
        self._open = graph
        self.graphs.append(graph)

    def _end(self) -> None:
        graph, self._open = self._open, None
        assert graph is not None
        graph.capture_end()

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: Any,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = torch.empty(len(q), self._size, dtype=q.dtype, device=q.device)
        self._end()
        self.calls.append(_Attend(layer, _borrowed(q), _borrowed(k), _borrowed(v), sinks, _borrowed(out)))
        self._begin()
        return out


@dataclass(frozen=True, slots=True, eq=False)
class _Captured:
    cells: torch.Tensor
    """(2, size) int32: rows and positions."""
    graphs: list[torch.cuda.CUDAGraph]
    calls: list[_Attend]
    """One fewer than graphs."""
    outputs: tuple[torch.Tensor, torch.Tensor]
    """The outputs of `Forward.hidden`."""


class PromptGraphs:
    """largest: tokens of the largest captured step; 0: none, also where decode steps cannot be captured."""

    def __init__(
        self, forward: Forward, attention: AttentionBackend, table: DeviceTables, largest: int, device: torch.device
    ) -> None:
        self._forward = forward
        self._attention = attention
        self._table = table
        self._device = device
        is_captured = device.type == "cuda" and attention.capture_buffers(1) is not None
        self._sizes = sizes_up_to(largest) if is_captured else []
        self._captured: dict[int, _Captured] = {}
        if self._sizes:
            self._capture()

    @torch.inference_mode()
    def _capture(self) -> None:
        started, free = time.perf_counter(), torch.cuda.mem_get_info(self._device)[0]
        memory = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(_capture_stream(self._device)):
            for size in reversed(self._sizes):
                self._captured[size] = self._capture_one(size, memory)
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # what steps took before they were captured is of no use on another stream
        logger.info(
            "captured steps of prompts of %d sizes up to %d tokens: %.1f s, %.2f GiB", len(self._sizes),
            self._sizes[-1], time.perf_counter() - started,
            (free - torch.cuda.mem_get_info(self._device)[0]) / (1 << 30),
        )  # fmt: skip

    def _capture_one(self, size: int, memory: Any) -> _Captured:
        cells = upload(self._cells(size), self._device)
        passing = _Passing(self._attention)
        self._forward.hidden(cells[0], cells[1], None, passing)
        torch.cuda.synchronize(self._device)
        pieces = _Pieces(self._attention, memory)
        with pieces:
            hidden, finite = self._forward.hidden(cells[0], cells[1], None, pieces)
        return _Captured(cells, pieces.graphs, pieces.calls, (_borrowed(hidden), _borrowed(finite)))

    def _cells(self, size: int) -> npt.NDArray[np.int32]:
        """The cells of so many padding tokens."""
        cells = np.zeros((2, size), dtype=np.int32)
        cells[0] = self._table.scratch_row
        return cells

    def size_for(self, tokens: int) -> int:
        """Tokens of the smallest graph that computes so many; 0: none."""
        at = bisect_left(self._sizes, tokens)
        return self._sizes[at] if at < len(self._sizes) else 0

    def hidden(
        self,
        cells: npt.NDArray[np.int32],
        plan: Any,
        size: int,
        adapters: AdapterStep | None = None,
        media: StepMedia | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`Forward.hidden` of cells (2, tokens): rows and positions. size: of the graph, 0 = none, as with adapters
        and items. The next step may overwrite the result."""
        tokens = cells.shape[1]
        captured = self._captured.get(size)
        if captured is None:
            there = upload(cells, self._device)
            return self._forward.hidden(there[0], there[1], plan, adapters=adapters, media=media)
        padded = self._cells(size)
        padded[:, :tokens] = cells
        captured.cells.copy_(pinned(padded, self._device), non_blocking=True)
        captured.graphs[0].replay()
        for graph, call in zip(captured.graphs[1:], captured.calls, strict=True):
            q, k, v, out = (x[:tokens] for x in (call.q, call.k, call.v, call.out))
            self._attention.forward(call.layer, q, k, v, plan, call.sinks, out)
            graph.replay()
        hidden, finite = captured.outputs
        return hidden[:tokens], finite[:tokens]
