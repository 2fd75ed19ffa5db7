"""Products of fp8 matrices for CUDA: activations become e4m3 on their way in. Layouts: `models.quantization.fp8`.

Batches of more than a few tokens and one scale a row take `torch._scaled_mm` (cuBLAS, CUTLASS). Few tokens, where
streaming the weights is all that counts, and scales within a row take the kernel here. What is computed is the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

FEW_TOKENS = 16
"""One tile of the tensor cores."""
_MULTIPLE = 16
"""torch._scaled_mm wants sizes that are multiples of this."""
_LARGEST: tl.constexpr = tl.constexpr(448.0)
_SMALLEST_AMAX: tl.constexpr = tl.constexpr(1e-12)


@triton.jit
def quantise_groups(x_ptr, values_ptr, scales_ptr, static, rows, columns, STATIC: tl.constexpr, BLOCK: tl.constexpr):
    """One group of a row: its scale, its elements over the scale as e4m3; NaN for those that are not finite."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    column = group * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * columns + column, inside, other=0.0).to(tl.float32)
    scale = static if STATIC else tl.maximum(tl.max(tl.abs(x), 0), _SMALLEST_AMAX) / _LARGEST
    x = x / scale
    kept = tl.minimum(tl.maximum(x, -_LARGEST), _LARGEST)
    x = tl.where(x - x == 0.0, kept, float("nan"))
    tl.store(values_ptr + row * columns + column, x.to(values_ptr.dtype.element_ty), inside)
    tl.store(scales_ptr + group * rows + row, scale)


@triton.jit
def scaled_product(
    x_ptr, x_scales_ptr, weight_ptr, scales_ptr, bias_ptr, out_ptr, rows, outputs, inputs,
    BIAS: tl.constexpr, GROUPED: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
):  # fmt: skip
    """A tile of (x x scales) times (weight x scales), transposed. GROUPED: a group is BLOCK_INPUTS inputs; else all."""
    output = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_INPUTS)
    x_at = x_ptr + row[:, None].to(tl.int64) * inputs + column[None, :]
    weight_at = weight_ptr + output[None, :].to(tl.int64) * inputs + column[:, None]
    total = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32)
    for start in range(0, inputs, BLOCK_INPUTS):
        x_inside = row[:, None] < rows
        weight_inside = output[None, :] < outputs
        if not EVEN:
            x_inside = x_inside & (start + column[None, :] < inputs)
            weight_inside = weight_inside & (start + column[:, None] < inputs)
        x = tl.load(x_at + start, x_inside, other=0.0)
        weight = tl.load(weight_at + start, weight_inside, other=0.0)
        if GROUPED:
            group = start // BLOCK_INPUTS
            x_scale = tl.load(x_scales_ptr + group * rows + row, row < rows, other=0.0)
            scale = tl.load(scales_ptr + group * outputs + output, output < outputs, other=0.0)
            total += tl.dot(x, weight) * (x_scale[:, None] * scale[None, :])
        else:
            # Hopper adds up products of fp8 in few bits: a block of them at most, then float32
            total = tl.dot(x, weight, total, max_num_imprecise_acc=BLOCK_INPUTS)
    if not GROUPED:
        x_scale = tl.load(x_scales_ptr + row, row < rows, other=0.0)
        scale = tl.load(scales_ptr + output, output < outputs, other=0.0)
        total *= x_scale[:, None] * scale[None, :]
    if BIAS:
        total += tl.load(bias_ptr + output, output < outputs, other=0.0).to(tl.float32)[None, :]
    place = out_ptr + row[:, None].to(tl.int64) * outputs + output[None, :]
    tl.store(place, total.to(out_ptr.dtype.element_ty), (row[:, None] < rows) & (output[None, :] < outputs))


def quantise(x: torch.Tensor, group: int, static: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """As `models.quantization.fp8.quantise`. `group` is a power of two, or all columns."""
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
