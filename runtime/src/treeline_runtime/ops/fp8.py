"""fp8 matrix products for CUDA; activations become e4m3 on the way. Layouts: `models.quantization.fp8`.

Larger batches with one scale a row use `torch._scaled_mm` (cuBLAS, CUTLASS). A few tokens, where only streaming the
weights counts, and scales within a row use this module's kernel. Results are the same.
"""

from __future__ import annotations

import torch
import triton

from treeline_runtime.ops.fp8_kernels import quantise_groups, scaled_product

FEW_TOKENS = 16
"""A tile of the tensor cores."""
_MULTIPLE = 16
"""torch._scaled_mm needs sizes that are multiples of this."""


def quantise(x: torch.Tensor, group: int, static: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Like `models.quantization.fp8.quantise`. `group` is a power of two, or all columns."""
    rows, columns = x.shape
    groups = triton.cdiv(columns, group)
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(groups, rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(group)
    quantise_groups[(rows, groups)](
        x, values, scales, 1.0 if static is None else static, rows, columns, STATIC=static is not None, BLOCK=block,
        num_warps=min(max(block // 1024, 1), 16),
    )  # fmt: skip
    return values, scales


def scaled_linear(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    group: int,
    input_scale: float | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """x (tokens, inputs), a matrix in fp8 (outputs, inputs), bias (outputs,) → (tokens, outputs) in x's dtype."""
    (tokens, inputs), outputs = x.shape, values.shape[0]
    x_values, x_scales = quantise(x.contiguous(), group, input_scale)
    fits = inputs % _MULTIPLE == 0 and outputs % _MULTIPLE == 0 and x.dtype == torch.bfloat16 and x.is_cuda
    if tokens > FEW_TOKENS and group >= inputs and fits:
        out = torch._scaled_mm(
            x_values, values.t(), scale_a=x_scales.t(), scale_b=scales, out_dtype=x.dtype, use_fast_accum=True
        )
        return out if bias is None else out.add_(bias)
    out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
    few = tokens <= FEW_TOKENS
    block_rows, block_outputs = (FEW_TOKENS, 32) if few else (64, 128)
    block_inputs = 128 if group < inputs or not few else 256
    scaled_product[(triton.cdiv(outputs, block_outputs), triton.cdiv(tokens, block_rows))](
        x_values,
        x_scales,
        values,
        scales,
        x if bias is None else bias,
        out,
        tokens,
        outputs,
        inputs,
        BIAS=bias is not None,
        GROUPED=group < inputs,
        EVEN=inputs % block_inputs == 0,
        BLOCK_ROWS=block_rows,
        BLOCK_OUTPUTS=block_outputs,
        BLOCK_INPUTS=block_inputs,
        num_warps=4 if few else 8,
        num_stages=4 if few else 3,
    )
    return out
