"""Applies many adapters in one step: y += B (A x) with the adapter of each row.

Rows are sorted by slot, and two grouped products do the rest: "shrink" by A to the rank, "expand" by B. A step pays for
the adapters in it, up to their highest rank; rows without one are left out, and a step without any is not touched.
Decode steps on a GPU are graphs, in which each row reads the matrices of its slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from treeline_runtime.config import ConfigError
from treeline_runtime.models.adapters import Adapter, Site
from treeline_runtime.transfer import pinned, upload

ALIGNED_BYTES, ALIGNED = 16, 8
"""Grouped products want rows of a multiple of so many bytes, so ranks are padded to a multiple of so many numbers."""


def padded(rank: int) -> int:
    return -(-rank // ALIGNED) * ALIGNED


@dataclass(frozen=True, slots=True, eq=False)
class _Stack:
    """A site's matrices in all slots."""

    a: torch.Tensor
    """(slots, rank, projections, own inputs)"""
    b: torch.Tensor
    """(slots, rank, own outputs of all projections)"""
    widths: tuple[int, ...]
    """The own outputs of each projection."""
    ranks: torch.Tensor
    """(slots,) int32: the rank of each slot's adapter, padded; 0 if it has nothing here."""
    used: set[int] = field(default_factory=set)
    """Slots whose adapter has anything here."""


class AdapterPool:
    """Adapters on the device, in slots of equal size."""

    def __init__(
        self,
        sites: Sequence[Site],
        slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        graph_rows: int = 0,
    ) -> None:
        """graph_rows: tokens of a captured step, at most. Raises ConfigError where there are no grouped products of
        this dtype or of a site's width."""
        if device.type == "cuda" and dtype != torch.bfloat16:
            raise ConfigError(f"adapters on a GPU need --dtype bfloat16, not {str(dtype).removeprefix('torch.')}")
        for site in sites:
            if any(n * dtype.itemsize % ALIGNED_BYTES for n in (site.own_inputs, *site.own_outputs)):
                raise ConfigError(
                    f"adapters cannot be added to {site.names[0]}, which has {site.own_inputs} inputs and "
                    f"{', '.join(map(str, site.own_outputs))} outputs on a rank: the bytes of each must be a multiple "
                    f"of {ALIGNED_BYTES}"
                )
        rank = padded(max_rank)

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(slots, *shape, dtype=dtype, device=device)

        self._device, self._slots = device, slots
        self._uploads = torch.cuda.Stream(device) if device.type == "cuda" else None
        """A stream beside the one of steps, which go on meanwhile."""
        self._uploaded: dict[int, torch.cuda.Event] = {}
        """Slot → the end of its upload, until a step has waited for it."""
        self._ranks = [0] * slots
        self._ranks_there = torch.zeros(len(sites), slots, dtype=torch.int32, device=device)
        self._of_rows = torch.full((graph_rows,), -1, dtype=torch.int32, device=device)
        """The slot of each row of the captured step that is replayed next, -1: none."""
        self._stacks = {
            site.name: _Stack(
                zeros(rank, len(site.names), site.own_inputs),
                zeros(rank, sum(site.own_outputs)),
                site.own_outputs,
                ranks,
            )
            for site, ranks in zip(sites, self._ranks_there, strict=True)
        }
        if self._uploads is not None:
            self._uploads.wait_stream(torch.cuda.current_stream(device))  # which makes them zero

    def write(self, slot: int, adapter: Adapter) -> None:
        """Puts an adapter into a slot; the first step that uses it waits for that. Launched steps do not read the slot:
        the results of all that had rows for it are known."""
        with torch.cuda.stream(self._uploads):
            self._write(slot, adapter)
        if self._uploads is not None:
            self._uploaded[slot] = self._uploads.record_event()

    def _write(self, slot: int, adapter: Adapter) -> None:
        self._ranks[slot] = padded(adapter.rank)
        ranks = [self._ranks[slot] * (name in adapter.parts) for name in self._stacks]
        self._ranks_there[:, slot].copy_(pinned(np.array(ranks, dtype=np.int32), self._device), non_blocking=True)
        for name, stack in self._stacks.items():
            there = adapter.parts.get(name)
            if slot in stack.used:  # what another adapter's higher ranks have left
                for matrix in (stack.a, stack.b):
                    matrix[slot, 0 if there is None else len(there[0]) :].zero_()
                stack.used.discard(slot)
            if there is None:
                continue
            stack.used.add(slot)
            for matrix, part in zip((stack.a, stack.b), there, strict=True):
                matrix[slot, : len(part)].copy_(part, non_blocking=True)

    def captured(self, rows: int) -> AdapterStep:
        """The adapters of a captured step of so many rows: those that `choose` has written before a replay."""
        return _Captured(self._stacks, self._of_rows[:rows])

    def choose(self, slots: list[int], q_lens: list[int], rows: int) -> None:
        """slots, q_lens: as of `step`. Gives them to the captured step of so many rows."""
        self._wait(set(slots))
        of_rows = np.full(rows, -1, dtype=np.int32)
        of_rows[: sum(q_lens)] = np.repeat(slots, q_lens)
        self._of_rows[:rows].copy_(pinned(of_rows, self._device), non_blocking=True)

    def _wait(self, slots: set[int]) -> None:
        """Lets the next step begin when these are uploaded."""
        for slot in self._uploaded.keys() & slots:
            self._uploaded.pop(slot).wait()

    def step(self, slots: list[int], q_lens: list[int]) -> AdapterStep | None:
        """slots, q_lens: for each sequence the slot of its adapter, -1: none; and its tokens. None if all have none."""
        of_rows = np.repeat(slots, q_lens)
        used = set(slots) - {-1}
        if not used:
            return None
        self._wait(used)
        order = np.argsort(of_rows % (self._slots + 1), kind="stable")  # those without one come last
        ends = np.bincount(of_rows[of_rows >= 0], minlength=self._slots).cumsum()
        return _Sorted(
            self._stacks, used, max(self._ranks[slot] for slot in used), int(ends[-1]),
            upload(order, self._device), upload(np.argsort(order), self._device),
            upload(ends.astype(np.int32), self._device),
        )  # fmt: skip


class AdapterStep(Protocol):
    """The adapters of a step's rows."""

    def add(self, site: Site, x: torch.Tensor, y: torch.Tensor) -> None:
        """x (tokens, inputs), y (tokens, outputs of all projections): adds to y what the adapters make of x."""


@dataclass(frozen=True, slots=True, eq=False)
class _Captured:
    """Implements `AdapterStep` for captured steps."""

    _stacks: dict[str, _Stack]
    _of_rows: torch.Tensor

    def add(self, site: Site, x: torch.Tensor, y: torch.Tensor) -> None:
        from treeline_runtime.ops.adapter_kernels import add_low_rank  # Triton, which a CPU may not have

        stack = self._stacks[site.name]
        add_low_rank(x, y, stack.a, stack.b, stack.widths, self._of_rows, stack.ranks)


@dataclass(frozen=True, slots=True, eq=False)
class _Sorted:
    """Implements `AdapterStep` by grouped products."""

    _stacks: dict[str, _Stack]
    _slots: set[int]
    _rank: int
    _count: int
    """Rows with an adapter."""
    _order: torch.Tensor
    """All rows by slot, those without an adapter last."""
    _inverse: torch.Tensor
    """The place of each row in that order."""
    _ends: torch.Tensor
    """(slots,) int32: where each slot's rows end there."""

    def add(self, site: Site, x: torch.Tensor, y: torch.Tensor) -> None:
        stack, rank = self._stacks[site.name], self._rank
        if stack.used.isdisjoint(self._slots):
            return
        shrink = stack.a[:, :rank].flatten(1, 2).transpose(1, 2)
        low = F.grouped_mm(x.index_select(0, self._order), shrink, offs=self._ends)
        lows = low.view(len(low), rank, -1).permute(2, 0, 1).contiguous()
        for low, b, outputs in zip(lows, stack.b.split(stack.widths, 2), y.split(stack.widths, 1), strict=True):
            change = F.grouped_mm(low, b[:, :rank], offs=self._ends)
            change[self._count :] = 0  # rows beyond the last group are undefined
            outputs += change.index_select(0, self._inverse)  # on a CPU `index_add_` is slow


def pool_bytes(sites: Sequence[Site], slots: int, max_rank: int, element_bytes: int) -> int:
    """The device memory of an `AdapterPool`."""
    elements = sum(site.own_inputs * len(site.names) + sum(site.own_outputs) for site in sites)
    return slots * padded(max_rank) * elements * element_bytes
