"""Decode steps as CUDA graphs: one launch instead of hundreds of kernels.

Some batch sizes are captured, the largest first, so that the others fit into its memory; all share one place for
logits, which outlive the step. A batch uses the smallest size that holds it, padded with one-token sequences in the
scratch row. Engines that serve adapters capture fewer sizes once more, with the adapters of each row, so that steps
without any pay nothing.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from treeline_runtime.attention import AttentionBackend, Layout
from treeline_runtime.models.lora import AdapterPool
from treeline_runtime.scheduler.forward import DecodeInputs, DeviceTables, Forward, OnDevice, Tokens
from treeline_runtime.transfer import pinned

logger = logging.getLogger(__name__)

_NO_KEYS = np.empty((0, 2), dtype=np.int32)


def sizes_up_to(largest: int) -> list[int]:
    """1, 2, 4, 8, 16 and then by 8: from 72 on at most a tenth is padding."""
    steps = [1, 2, 4, *range(8, largest + 1, 8)]
    return sorted({size for size in steps if size <= largest} | ({largest} if largest else set()))


def kinds_up_to(largest: int, *, adapts: bool) -> list[tuple[int, bool]]:
    """What is captured: sizes, and whether with adapters, if the engine has any."""
    sizes = sizes_up_to(largest)
    few = [size for size in sizes if size.bit_count() == 1 or size == largest] if adapts else []
    return sorted([(size, False) for size in sizes] + [(size, True) for size in few], reverse=True)


@dataclass(slots=True, eq=False)
class _Captured:
    graph: torch.cuda.CUDAGraph
    packed: torch.Tensor
    """(PACKED x size,) int32: of `DecodeInputs`."""
    buffers: Any
    outputs: tuple[torch.Tensor, Tokens, torch.Tensor]


class DecodeGraphs:
    """If the backend's steps cannot be captured, `largest` is 0."""

    def __init__(
        self,
        forward: Forward,
        attention: AttentionBackend,
        table: DeviceTables,
        largest: int,
        device: torch.device,
        adapters: AdapterPool | None = None,
    ) -> None:
        self._adapters = adapters
        self._forward = forward
        self._attention = attention
        self._table = table
        self._device = device
        self._captured: dict[tuple[int, bool], _Captured] = {}
        """By size, and whether with adapters."""
        if device.type == "cuda" and largest > 0:
            self._capture(kinds_up_to(largest, adapts=adapters is not None))
        self.largest = max((size for size, _ in self._captured), default=0)

    @torch.inference_mode()
    def _capture(self, kinds: list[tuple[int, bool]]) -> None:
        started, free = time.perf_counter(), torch.cuda.mem_get_info(self._device)[0]
        pool: Any = None
        largest = kinds[0][0]
        logits = self._forward.empty_logits(largest)
        for size, adapts in kinds:
            packed = torch.from_numpy(DecodeInputs([], [], [], [], _NO_KEYS).packed(size, self._table.scratch_row))
            inputs = packed.to(self._device)
            buffers = self._attention.capture_buffers(size)
            if buffers is None:
                return
            plan = self._plan(size, [], [], inputs, buffers)
            views, adapters = OnDevice.of(inputs), self._adapters.captured(size) if self._adapters and adapts else None
            # kernels are compiled and chosen outside of the capture
            self._forward.decode(views, plan, logits[:size], adapters)
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            # an application around the engine may use the device in its own threads meanwhile
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                outputs = self._forward.decode(views, plan, logits[:size], adapters)
            pool = graph.pool()
            self._captured[size, adapts] = _Captured(graph, inputs, buffers, outputs)
        torch.cuda.synchronize(self._device)
        taken = free - torch.cuda.mem_get_info(self._device)[0]
        seconds = time.perf_counter() - started
        logger.info(
            "captured decode steps of %d batch sizes up to %d: %.1f s, %.2f GiB", len(kinds), largest, seconds,
            taken / (1 << 30),
        )  # fmt: skip

    def size_for(self, tokens: int, *, adapts: bool) -> int:
        """Sequences of the smallest graph that computes so many, with adapters or without."""
        return min(size for size, kind in self._captured if size >= tokens and kind is adapts)

    def replay(
        self, inputs: DecodeInputs, ends: list[int], size: int, *, adapts: bool
    ) -> tuple[torch.Tensor, Tokens, torch.Tensor]:
        """`Forward.decode` of at most `size` sequences by its graph, with the adapters that were chosen for it or
        without. The next replay overwrites the result."""
        n = len(ends)
        captured = self._captured[size, adapts]
        packed = pinned(inputs.packed(size, self._table.scratch_row), self._device)
        captured.packed.copy_(packed, non_blocking=True)
        self._plan(size, inputs.rows, ends, captured.packed, captured.buffers)
        captured.graph.replay()
        logits, tokens, kv_finite = captured.outputs
        return logits[:n], Tokens(tokens.ids[:n], tokens.finite[:n]), kv_finite[:n]

    def _plan(self, size: int, rows: list[int], ends: list[int], packed: torch.Tensor, buffers: Any) -> Any:
        kv_lens = ends + [1] * (size - len(ends))
        layout = Layout([1] * size, kv_lens, self._table.page_table, packed[:size], self._table.on_host(rows))
        return self._attention.plan(layout, buffers)
