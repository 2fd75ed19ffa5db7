"""The sum over several GPUs together with what follows it: each reads the others' summands directly.

The kernel's programs meet those of the same number on all GPUs, by flags in each other's memory; so no GPU reads what
another has not written yet. As all GPUs make the same calls in the same order, a GPU may write its summand of the next
call but one when its own next call is done: the others have read this one by then. So calls alternate between two
places for summands.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from treeline_runtime.ops.base import MEETINGS, Meeting
from treeline_runtime.ops.early_kernels import early_launch, take_turn
from treeline_runtime.ops.kernels import add_and_norm


def add_norm(
    meeting: Meeting,
    place: int,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    after: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Ops.add_norm` of the sum of what each rank has at `place` of its memory: the same bits on each rank."""
    rows, size = residual.shape
    out = residual if weight is None else torch.empty_like(residual)
    block = triton.next_power_of_2(size)
    sum_add_norm[(min(rows, MEETINGS),)](
        meeting.bases,
        place,
        meeting.flags,
        residual if after is None else after,
        residual,
        residual if weight is None else weight,
        out,
        rows,
        size,
        eps,
        RANK=meeting.rank,
        RANKS=len(meeting.bases),
        AFTER=after is not None,
        NORM=weight is not None,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
        **early_launch(residual.device),
    )
    return out, residual


@triton.jit
def meet(bases_ptr, flags, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Waits until this program runs on all ranks. What a rank wrote before can be read after."""
    mine = tl.program_id(0) * RANKS
    for other in tl.static_range(RANKS):
        if other != RANK:
            flag = (tl.load(bases_ptr + other) + flags).to(tl.pointer_type(tl.int32)) + mine + RANK
            while tl.atomic_cas(flag, 0, 1, sem="release", scope="sys") == 1:
                pass
    for other in tl.static_range(RANKS):
        if other != RANK:
            flag = (tl.load(bases_ptr + RANK) + flags).to(tl.pointer_type(tl.int32)) + mine + other
            while tl.atomic_cas(flag, 1, 0, sem="acquire", scope="sys") == 0:
                pass


@triton.jit(do_not_specialize=["rows"])
def sum_add_norm(
    bases_ptr, place, flags, after_ptr, residual_ptr, weight_ptr, out_ptr, rows, size, eps,
    RANK: tl.constexpr, RANKS: tl.constexpr, AFTER: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """`kernels.norm` of the sum of all ranks' rows, with the residual."""
    take_turn(EARLY)
    meet(bases_ptr, flags, RANK, RANKS)
    columns = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        first = row.to(tl.int64) * size
        x = tl.zeros((BLOCK,), tl.float32)
        for rank in tl.static_range(RANKS):
            part = tl.multiple_of((tl.load(bases_ptr + rank) + place).to(residual_ptr.dtype), 16)
            x += tl.load(part + first + columns, columns < size, other=0.0).to(tl.float32)
        x = x.to(residual_ptr.dtype.element_ty).to(tl.float32)
        add_and_norm(
            x, after_ptr, residual_ptr + first, weight_ptr, out_ptr + first, columns, size, eps, AFTER, True, NORM
        )
