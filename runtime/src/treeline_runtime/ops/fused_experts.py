"""A mixture of experts on CUDA: sorting pairs, two launches for the products, a sum.

All sizes follow from the number of tokens, so it can be captured; nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from treeline_runtime.ops import expert_kernels as kernels
from treeline_runtime.ops.base import Experts

_SCAN = 2048
"""Pairs that a sorting program reads at once."""
_GROUP = 8
_FEW = 4
"""With this many times fewer pairs than experts, few experts have two: pairs are not sorted, and each is a block."""


@dataclass(frozen=True, slots=True)
class Tile:
    """The tile of one program of a product."""

    rows: int
    """Pairs."""
    weights: int
    """Rows of the weights: outputs, or half as many gates with their ups."""
    step: int
    """Inputs per step."""
    warps: int
    stages: int


TILES = (Tile(16, 64, 128, 4, 4), Tile(64, 128, 64, 4, 3), Tile(128, 128, 64, 8, 3))
"""At most 96 KiB of shared memory each, with two bytes an element, as on Ada and consumer Ampere."""


def tile_for(pairs: int, experts: int) -> Tile:
    """By the average number of pairs per expert."""
    average = pairs / experts
    return next((tile for tile in TILES if average <= tile.rows), TILES[-1])


def most_blocks(pairs: int, experts: int, rows: int) -> int:
    """The most blocks of `rows` pairs; the last one of each expert may be partial."""
    return (pairs + min(experts, pairs) * (rows - 1)) // rows


class FusedExperts:
    """Compiles every tile when it first sees a shape, so that later token counts do not wait for a compiler."""

    def __init__(self) -> None:
        self._compiled: set[tuple[torch.dtype, torch.Size, int]] = set()

    def __call__(self, x: torch.Tensor, experts: Experts, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        local = experts.local
        pairs, count = ids.numel(), len(experts.down if local is None else local)
        shape = (x.dtype, experts.down.shape, ids.shape[1])
        if shape not in self._compiled:
            self._compiled.add(shape)
            for tile in TILES:
                compute(x[:1], experts, scores[:1], ids[:1], tile, is_sorted=True)
        # sorting leaves out the pairs of other ranks' experts
        is_sorted = pairs * _FEW > count or local is not None
        return compute(x, experts, scores, ids, tile_for(pairs, count), is_sorted=is_sorted)


def compute(
    x: torch.Tensor, experts: Experts, scores: torch.Tensor, ids: torch.Tensor, tile: Tile, *, is_sorted: bool
) -> torch.Tensor:
    count, hidden, inner = experts.down.shape
    tokens, top_k = ids.shape
    pairs = tokens * top_k
    if experts.local is not None:
        ids = experts.local[ids]
    blocks = most_blocks(pairs, count, tile.rows) if is_sorted else pairs
    order, block_experts, num_blocks = _sort(ids, count, tile.rows, blocks) if is_sorted else (ids, ids, ids)
    between = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    new = torch.empty if experts.local is None else torch.zeros
    out = new(tokens, top_k, hidden, dtype=x.dtype, device=x.device)
    into_bias, out_bias = experts.biases or (experts.gate_up, experts.down)
    alpha, limit = (experts.clamped.alpha, experts.clamped.limit) if experts.clamped is not None else (0.0, 0.0)
    common = {
        "BIAS": experts.biases is not None,
        "SORTED": is_sorted,
        "ROWS": tile.rows,
        "GROUP": _GROUP,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    columns = tile.weights // 2
    kernels.gate_up[(blocks * triton.cdiv(inner, columns),)](
        x, experts.gate_up, into_bias, between, order, block_experts, num_blocks, pairs, hidden, inner, alpha, limit,
        TOP_K=top_k, CLAMPED=experts.clamped is not None, COLUMNS=columns,
        **_steps(tile, hidden, x.element_size()), **common,
    )  # fmt: skip
    kernels.down[(blocks * triton.cdiv(hidden, tile.weights),)](
        between, experts.down, out_bias, scores, out, order, block_experts, num_blocks, pairs, hidden, inner,
        COLUMNS=tile.weights, **_steps(tile, inner, x.element_size()), **common,
    )  # fmt: skip
    return out.sum(1)


def _steps(tile: Tile, inputs: int, element_size: int) -> dict[str, int]:
    """Half as many inputs at a time for larger elements, or to divide evenly (gpt-oss has 2,880)."""
    step = tile.step if element_size == 2 and inputs % tile.step == 0 else tile.step // 2
    return {"STEP": step, "EVEN": inputs % step == 0}


def _sort(ids: torch.Tensor, experts: int, rows: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns pairs block by block (blocks x rows,), each block's expert (blocks,), and the number of blocks (1,)."""
    pairs, device = ids.numel(), ids.device
    counts = torch.empty(experts, dtype=torch.int32, device=device)
    order = torch.empty(blocks * rows, dtype=torch.int32, device=device)
    block_experts = torch.empty(blocks, dtype=torch.int32, device=device)
    num_blocks = torch.empty(1, dtype=torch.int32, device=device)
    kernels.count_pairs[(experts,)](ids, counts, pairs, BLOCK=_SCAN, num_warps=4)
    kernels.sort_pairs[(experts,)](
        ids, counts, order, block_experts, num_blocks, pairs, experts, ROWS=rows,
        EXPERTS=triton.next_power_of_2(experts), BLOCK=_SCAN, num_warps=4,
    )  # fmt: skip
    return order, block_experts, num_blocks
