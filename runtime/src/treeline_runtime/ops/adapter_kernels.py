"""Adapters of a decode step, inside a CUDA graph: y += B (A x) with the matrices of each row's own slot.

Two kernels: "shrink" by A to the rank, in parts of the input whose results are summed in order, and "expand" by B. Each
row reads its matrices by itself, as in Punica (https://arxiv.org/abs/2310.18547), so which adapters a step has is known
on the device alone; rows of one slot find them in the cache. Tensor cores, for all rows of a slot at once, were slower:
a step has few rows for each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from treeline_runtime.ops.early_kernels import early_launch, let_next_begin, wait_for_others

PART = 512
"""Inputs that one program of `shrink` reads."""
OUTPUTS = 256
"""Outputs that one program of `expand` writes."""


def add_low_rank(
    x: torch.Tensor,
    y: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    widths: tuple[int, ...],
    slots: torch.Tensor,
    ranks: torch.Tensor,
) -> None:
    """Adds to y what the adapters make of x.

    x (rows, inputs), y (rows, outputs of all projections, of these widths), a (slots, rank, projections, inputs),
    b (slots, rank, outputs); slots (rows,) int32, -1: none; ranks (slots,) int32, 0: no change.
    """
    rows, inputs = x.shape
    projections, rank, parts = len(widths), a.shape[1], triton.cdiv(inputs, PART)
    low = torch.empty(rows, projections, parts, rank, dtype=torch.float32, device=x.device)
    early = early_launch(x.device)
    shrink[(parts, projections, rows)](
        x, x.stride(0), a, low, slots, ranks, inputs,
        RANK=rank, PROJECTIONS=projections, PART=PART, BLOCK=256, num_warps=4, **early,
    )  # fmt: skip
    begins = [sum(widths[:i]) for i in range(projections)] + [0] * (3 - projections)
    expand[(triton.cdiv(max(widths), OUTPUTS), projections, rows)](
        y, y.stride(0), b, low, slots, ranks, *begins, y.shape[1], parts,
        RANK=rank, PROJECTIONS=projections, PARTS=triton.next_power_of_2(parts), BLOCK=OUTPUTS, num_warps=1, **early,
    )  # fmt: skip


_STEP = tl.constexpr(16)
"""Ranks that are read at once."""


@triton.jit
def shrink(
    x_ptr, x_stride, a_ptr, low_ptr, slots_ptr, ranks_ptr, inputs,
    RANK: tl.constexpr, PROJECTIONS: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """low[row, projection, part] = A x over a part of the inputs."""
    let_next_begin(EARLY)
    part, projection, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    wait_for_others(EARLY)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    rank = tl.load(ranks_ptr + slot, mask=slot >= 0, other=0)
    numbers, columns = tl.arange(0, _STEP), tl.arange(0, BLOCK)
    out = low_ptr + ((row * PROJECTIONS + projection) * tl.num_programs(0) + part) * RANK
    for first in range(0, rank, _STEP):
        found = tl.zeros((_STEP, BLOCK), dtype=tl.float32)
        lines = ((slot * RANK + first + numbers) * PROJECTIONS + projection) * inputs
        for at in tl.static_range(0, PART, BLOCK):
            place = part * PART + at + columns
            mask = (first + numbers < rank)[:, None] & (place < inputs)[None, :]
            x = tl.load(x_ptr + row * x_stride + place, mask=place < inputs, other=0.0).to(tl.float32)
            a = tl.load(a_ptr + lines[:, None] + place[None, :], mask=mask, other=0.0).to(tl.float32)
            found += a * x[None, :]
        tl.store(out + first + numbers, tl.sum(found, axis=1), mask=first + numbers < rank)


@triton.jit
def expand(
    y_ptr, y_stride, b_ptr, low_ptr, slots_ptr, ranks_ptr, begin0, begin1, begin2, outputs, parts,
    RANK: tl.constexpr, PROJECTIONS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y[row, outputs of a projection] += B low[row, projection]."""
    let_next_begin(EARLY)
    projection, row = tl.program_id(1), tl.program_id(2)
    begin, end = begin0, outputs
    if PROJECTIONS > 1:
        begin = tl.where(projection == 0, begin0, begin1)
        end = tl.where(projection == 0, begin1, outputs)
    if PROJECTIONS > 2:
        begin = tl.where(projection == 2, begin2, begin)
        end = tl.where(projection == 1, begin2, end)
    begin += tl.program_id(0) * BLOCK
    wait_for_others(EARLY)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    rank = tl.load(ranks_ptr + slot, mask=slot >= 0, other=0)
    if (rank > 0) & (begin < end):
        numbers, each, place = tl.arange(0, _STEP), tl.arange(0, PARTS), begin + tl.arange(0, BLOCK)
        there = place < end
        lows = low_ptr + (row * PROJECTIONS + projection) * parts * RANK
        y = y_ptr + row * y_stride + place
        found = tl.load(y, mask=there, other=0.0).to(tl.float32)
        for first in range(0, rank, _STEP):
            known = first + numbers < rank
            mask = known[:, None] & (each < parts)[None, :]
            low = tl.sum(tl.load(lows + each[None, :] * RANK + first + numbers[:, None], mask=mask, other=0.0), axis=1)
            lines = b_ptr + (slot * RANK + first + numbers) * outputs
            b = tl.load(lines[:, None] + place[None, :], mask=known[:, None] & there[None, :], other=0.0)
            found += tl.sum(b.to(tl.float32) * low[:, None], axis=0)
        tl.store(y, found.to(y_ptr.dtype.element_ty), mask=there)
