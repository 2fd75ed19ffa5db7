"""The Triton kernels of `ops.fp8`."""

from __future__ import annotations

import triton
import triton.language as tl

from treeline_runtime.ops.kernels import within_e4m3

_LARGEST: tl.constexpr = tl.constexpr(448.0)
_SMALLEST_AMAX: tl.constexpr = tl.constexpr(1e-12)


@triton.jit(do_not_specialize=["rows"])
def quantise_groups(x_ptr, values_ptr, scales_ptr, static, rows, columns, STATIC: tl.constexpr, BLOCK: tl.constexpr):
    """A group of a row: its scale, and its elements over the scale as e4m3; NaN for those that are not finite."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    column = group * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * columns + column, inside, other=0.0).to(tl.float32)
    scale = static if STATIC else tl.maximum(tl.max(tl.abs(x), 0), _SMALLEST_AMAX) / _LARGEST
    x = within_e4m3(x / scale)
    tl.store(values_ptr + row * columns + column, x.to(values_ptr.dtype.element_ty), inside)
    tl.store(scales_ptr + group * rows + row, scale)


@triton.jit(do_not_specialize=["rows"])
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
