"""Captured steps where nothing can be captured."""

from __future__ import annotations

import torch
from treeline_runtime.attention import Layout
from treeline_runtime.scheduler.executor import Executor
from treeline_runtime.scheduler.forward import DecodeInputs, Tokens


class ComputedGraphs:
    """A stand-in for `DecodeGraphs`, which need a device to be captured: it computes what they replay."""

    def __init__(self, executor: Executor, largest: int) -> None:
        self.largest = largest
        self.of_several = 0
        """Steps in which a sequence had several tokens."""
        self.with_adapters = 0
        """Steps in which a sequence had an adapter."""
        self._executor = executor
        if executor._slots is not None:
            executor._slots._of_rows = torch.empty(largest, dtype=torch.int32)

    def size_for(self, tokens: int, *, adapts: bool) -> int:
        return tokens

    def replay(
        self, inputs: DecodeInputs, ends: list[int], size: int, *, adapts: bool
    ) -> tuple[torch.Tensor, Tokens, torch.Tensor]:
        table = self._executor._table
        there = inputs.on(torch.device("cpu"))
        rows = torch.tensor(inputs.rows)
        plan = self._executor._attention.plan(
            Layout([1] * len(ends), ends, table.page_table, rows, table.on_host(inputs.rows))
        )
        self.of_several += len(set(inputs.rows)) < len(inputs.rows)
        cells = {*zip(inputs.rows, inputs.positions, strict=True)}
        known = torch.tensor([(row, at + 1) for row, at in cells if (row, at + 1) in cells], dtype=torch.int64)
        before = table.token_pool[known.view(-1, 2).unbind(1)]
        self.with_adapters += adapts
        slots, adapters = self._executor._slots, None
        if adapts and slots is not None:
            adapters = slots.step(slots._of_rows[:size].tolist(), [1] * size)
        found = self._executor._forward.decode(there, plan, None, adapters)
        assert table.token_pool[known.view(-1, 2).unbind(1)].equal(before), "a token that is known was sampled"
        return found
