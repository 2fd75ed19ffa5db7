"""Numbers in fp8, e4m3: 4 bits of exponent, 3 of mantissa, up to 448, no infinity (https://arxiv.org/abs/2209.05433).

A matrix in fp8 is values x scales. Scales are (groups, rows): each row is cut into groups of `group` elements (the last
may be shorter) that share a scale; with one group it is the row's.

These PyTorch operations are the definition; `ops.fp8` has kernels for GPUs.
"""

from __future__ import annotations

import torch

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
SMALLEST_AMAX = 1e-12
"""The scale of a group of zeros."""
_ROWS_AT_ONCE = 1024
"""Rows of a weight quantised at once, which bounds the float32 copies."""


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """The nearest e4m3; larger values become the largest, values that are not finite NaN."""
    x = x.float()
    return torch.where(x.isfinite(), x.clamp(-LARGEST, LARGEST), torch.nan).to(E4M3)


def quantise(x: torch.Tensor, group: int, static: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """x (rows, columns) → values (rows, columns) e4m3, scales (groups, rows) float32.

    A scale is the largest magnitude of its group / 448, or `static`.
    """
    grouped = _grouped(x.float(), group)
    if static is None:
        # the maximum of a group with NaN is NaN: so is all of it
        scales = grouped.abs().amax(-1).clamp(min=SMALLEST_AMAX) / LARGEST
    else:
        scales = torch.full(grouped.shape[:2], static, dtype=torch.float32, device=x.device)
    values = to_e4m3(grouped / scales[:, :, None])
    return values.flatten(1)[:, : x.shape[1]].contiguous(), scales.t().contiguous()


def dequantise(values: torch.Tensor, scales: torch.Tensor, group: int) -> torch.Tensor:
    """values (rows, columns), scales (groups, rows) → (rows, columns) float32."""
    return values.float() * scales.t().repeat_interleave(group, dim=1)[:, : values.shape[1]]


def quantise_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight (outputs, inputs), float → values, scales (1, outputs)."""
    parts = [quantise(rows, weight.shape[1]) for rows in weight.split(_ROWS_AT_ONCE)]
    return torch.cat([values for values, _ in parts]), torch.cat([scales for _, scales in parts], dim=1)


def _grouped(x: torch.Tensor, group: int) -> torch.Tensor:
    """(rows, columns) → (rows, groups, group), padded with zeros."""
    missing = -x.shape[1] % group
    return torch.nn.functional.pad(x, (0, missing)).view(x.shape[0], -1, group)
