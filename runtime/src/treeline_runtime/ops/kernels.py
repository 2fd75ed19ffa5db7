"""The Triton kernels of `TritonOps`: one program per token, and per block of it.

Rows of activations are contiguous. Indices into pools and tables are 64 bits wide: those have more than 2^31 elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treeline_runtime.ops.early_kernels import let_next_begin, take_turn, wait_for_others


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "positions_ptr"])  # parts of one upload
def look_up(
    rows_ptr, positions_ptr, tokens_ptr, pages_ptr, cos_ptr, sin_ptr, deltas_ptr, ids_ptr, slots_ptr, cos_out_ptr,
    sin_out_ptr, unfinite_ptr, token_width, page_width, length,
    DELTAS: tl.constexpr, PAGE: tl.constexpr, ROPES: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One token's id, slot and angles, by its row and position."""
    take_turn(EARLY)
    token = tl.program_id(0)
    row = tl.load(rows_ptr + token).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    tl.store(ids_ptr + token, tl.load(tokens_ptr + row * token_width + position))
    page = tl.load(pages_ptr + row * page_width + position // PAGE)
    tl.store(slots_ptr + token, page * PAGE + position % PAGE)
    tl.store(unfinite_ptr + token, 0)
    turned = position
    if DELTAS:
        turned = tl.maximum(position + tl.load(deltas_ptr + row), 0)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    for rope in tl.static_range(ROPES):
        source = (rope * length + turned) * SIZE + columns
        target = (rope * tl.num_programs(0) + token) * SIZE + columns
        tl.store(cos_out_ptr + target, tl.load(cos_ptr + source, inside, other=0.0), inside)
        tl.store(sin_out_ptr + target, tl.load(sin_ptr + source, inside, other=0.0), inside)


@triton.jit(do_not_specialize_on_alignment=["tokens_ptr", "rows_ptr", "positions_ptr"])
def put(ids_ptr, tokens_ptr, rows_ptr, positions_ptr, width, EARLY: tl.constexpr):
    """Stores a token's id in its cell."""
    take_turn(EARLY)
    token = tl.program_id(0)
    cell = tl.load(rows_ptr + token).to(tl.int64) * width + tl.load(positions_ptr + token)
    tl.store(tokens_ptr + cell, tl.load(ids_ptr + token))


@triton.jit
def matrix_times_vector(
    x_ptr, weight_ptr, bias_ptr, out_ptr, inputs, BIAS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """OUTPUTS elements of weight x x; `inputs` is a multiple of BLOCK."""
    let_next_begin(EARLY)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    columns = tl.arange(0, BLOCK)
    rows = weight_ptr + outputs[:, None].to(tl.int64) * inputs
    # the first weights are on their way while the kernel before this one ends
    weights = tl.load(rows + columns[None, :]).to(tl.float32)
    wait_for_others(EARLY)
    total = weights * tl.load(x_ptr + columns).to(tl.float32)[None, :]
    for start in range(BLOCK, inputs, BLOCK):
        x = tl.load(x_ptr + start + columns).to(tl.float32)
        total += tl.load(rows + start + columns[None, :]).to(tl.float32) * x[None, :]
    result = tl.sum(total, 1)
    if BIAS:
        result += tl.load(bias_ptr + outputs).to(tl.float32)
    tl.store(out_ptr + outputs, result.to(out_ptr.dtype.element_ty))


@triton.jit
def add_and_norm(
    x, after_ptr, residual_ptr, weight_ptr, out_ptr, columns, size, eps,
    AFTER: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """`norm` of one row x, float32; residual_ptr, out_ptr: of the row."""
    inside = columns < size
    if AFTER:
        scale = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
        x = x * scale * tl.load(after_ptr + columns, inside, other=0.0).to(tl.float32)
        x = x.to(out_ptr.dtype.element_ty).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + columns, inside, other=0.0).to(tl.float32)
        x = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + columns, x, inside)
        x = x.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
        weight = tl.load(weight_ptr + columns, inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + columns, (x * scale * weight).to(out_ptr.dtype.element_ty), inside)


@triton.jit
def norm(
    x_ptr, after_ptr, residual_ptr, weight_ptr, out_ptr, size, stride, eps,
    AFTER: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """RMS norm of a row (NORM); with ADD, of its sum with the residual, which the sum replaces.

    AFTER: the row is normed before it is added. Rows of x and out are `stride` apart.
    """
    take_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + columns, columns < size, other=0.0).to(tl.float32)
    add_and_norm(
        x, after_ptr, residual_ptr + row * size, weight_ptr, out_ptr + row * stride, columns, size, eps,
        AFTER, ADD, NORM,
    )  # fmt: skip


@triton.jit
def gate(gate_up_ptr, out_ptr, size, GELU: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """silu(gate) x up, or with GELU gelu(gate) x up, for one block of a row."""
    take_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(gate_up_ptr + row * 2 * size + columns, inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * size + size + columns, inside, other=0.0).to(tl.float32)
    inner = gate
    if GELU:  # gelu by tanh: (1 + tanh(x)) / 2 is sigmoid(2 x), x = sqrt(2 / pi) (gate + 0.044715 gate^3)
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    out = gate * tl.sigmoid(inner) * up
    tl.store(out_ptr + row * size + columns, out.to(out_ptr.dtype.element_ty), inside)


@triton.jit
def softcap(x_ptr, count, cap, BLOCK: tl.constexpr):
    """cap x tanh(x / cap), in place, for one block of all elements."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    x = tl.load(x_ptr + at, inside, other=0.0).to(tl.float32)
    out = (2.0 * tl.sigmoid(2.0 / cap * x) - 1.0) * cap
    tl.store(x_ptr + at, out.to(x_ptr.dtype.element_ty), inside)


@triton.jit
def pairs_of(HALF: tl.constexpr, PAIRS: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """0 … HALF - 1, and for each two elements of a head: i and PAIRS + i, which are rotated, for the first PAIRS; the
    rest in any order."""
    half = tl.arange(0, BLOCK_HALF)
    low_at = half
    high_at = half + HALF
    if PAIRS < HALF:
        low_at = tl.where(half < PAIRS, half, half + PAIRS)
        high_at = tl.where(half < PAIRS, half + PAIRS, half + HALF)
    return half, low_at, high_at


@triton.jit
def rotate_and_store(
    qkv_ptr, q_ptr, keys_ptr, values_ptr, slots_ptr, cos_ptr, sin_ptr, norm_ptr, unfinite_ptr, eps, key_scale,
    value_scale,
    QUERY: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, BLOCK_HALF: tl.constexpr,
    NORM: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A block of a token's heads: norms and rotates queries and keys, stores keys and values in the token's slot.

    Queries go to q; rotated keys are also written back. FP8: the slots are e4m3, of values over their scale.

    cos and sin (tokens, 2 x PAIRS) from `rope_tables`: sin's first half has the rotation's sign.
    """
    take_turn(EARLY)
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    half, low_at, high_at = pairs_of(HALF, PAIRS, BLOCK_HALF)
    dim: tl.constexpr = 2 * HALF
    inside = (heads[:, None] < QUERY + 2 * KV) & (half[None, :] < HALF)
    first = heads[:, None] * dim + low_at[None, :]
    second = heads[:, None] * dim + high_at[None, :]
    base = qkv_ptr + token * (QUERY + 2 * KV) * dim
    low = tl.load(base + first, inside, other=0.0).to(tl.float32)
    high = tl.load(base + second, inside, other=0.0).to(tl.float32)
    rotated = heads[:, None] < QUERY + KV
    if NORM:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / dim + eps)[:, None]
        weighted = inside & rotated
        low = tl.where(rotated, low * scale * tl.load(norm_ptr + first, weighted, other=1.0).to(tl.float32), low)
        high = tl.where(rotated, high * scale * tl.load(norm_ptr + second, weighted, other=1.0).to(tl.float32), high)
    angle = token * 2 * PAIRS + half
    cos = tl.load(cos_ptr + angle, half < PAIRS, other=1.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + angle + PAIRS, half < PAIRS, other=0.0).to(tl.float32)[None, :]
    new_low = tl.where(rotated, low * cos - high * sin, low)
    new_high = tl.where(rotated, high * cos + low * sin, high)

    kind = q_ptr.dtype.element_ty
    to_q = inside & (heads[:, None] < QUERY)
    tl.store(q_ptr + token * QUERY * dim + first, new_low.to(kind), to_q)
    tl.store(q_ptr + token * QUERY * dim + second, new_high.to(kind), to_q)

    slot = tl.load(slots_ptr + token) * KV * dim
    to_k = inside & (heads[:, None] >= QUERY) & rotated
    to_v = inside & (heads[:, None] >= QUERY + KV)
    tl.store(base + first, new_low.to(kind), to_k)
    tl.store(base + second, new_high.to(kind), to_k)
    where_k = keys_ptr + slot - QUERY * dim
    where_v = values_ptr + slot - (QUERY + KV) * dim
    scale = tl.where(rotated, key_scale, value_scale)
    wrong = store(new_low, scale, where_k + first, to_k, where_v + first, to_v, FP8)
    wrong += store(new_high, scale, where_k + second, to_k, where_v + second, to_v, FP8)
    if tl.sum(tl.sum(wrong, 1), 0) > 0:
        tl.store(unfinite_ptr + token, 1)


@triton.jit
def store(x, scale, where_k, to_k, where_v, to_v, FP8: tl.constexpr):
    """Stores the keys and values in x; returns 1 where they are not finite, else 0."""
    if FP8:
        x = within_e4m3(x / scale)
    x = x.to(where_k.dtype.element_ty)
    tl.store(where_k, x, to_k)
    tl.store(where_v, x, to_v)
    # as stored: float16 ends earlier than float32. x - x is 0, or NaN where x is NaN or infinite
    x = x.to(tl.float32)
    return tl.where((to_k | to_v) & (x - x != 0.0), 1, 0)


@triton.jit
def within_e4m3(x):
    """x, at most the largest e4m3; NaN if not finite, since e4m3 has no infinity."""
    return tl.where(x - x == 0.0, tl.minimum(tl.maximum(x, -448.0), 448.0), float("nan"))


@triton.jit
def mix(x, times: tl.constexpr):
    """The second half of `sampling.noise`'s mixer; x (uint32) is already multiplied once."""
    x ^= x >> 15
    x *= times
    return x


@triton.jit(do_not_specialize_on_alignment=["temperatures_ptr", "keys_ptr"])  # parts of one upload
def best_of_block(
    logits_ptr, temperatures_ptr, keys_ptr, scores_ptr, best_ptr, vocab, blocks, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The best token of a block of a row: its logit over the temperature, minus the logarithm of its arrival time.

    Arrival times are those of `sampling.noise.negative_exponentials`; at temperature 0 there are none. A score of NaN
    stands for logits that are not finite (-inf is allowed, for forbidden tokens).
    """
    take_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    logits = tl.load(logits_ptr + row * vocab + ids, inside, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperatures_ptr + row)
    bad = (logits != logits) | (logits == float("inf"))
    scores = logits
    if temperature > 0.0:
        x = ids.to(tl.uint32) + 0x9E3779B9
        for _ in tl.static_range(2):
            x ^= x >> 16
            x *= 0x21F0AAAD
            x = mix(x, 0x735A2D97)
            x ^= x >> 15
        x ^= tl.load(keys_ptr + 2 * row).to(tl.uint32, bitcast=True)
        x *= tl.load(keys_ptr + 2 * row + 1).to(tl.uint32, bitcast=True)
        x = mix(x, 0x735A2D97)
        u = ((x >> 1).to(tl.float32) + 0.5) * (4.656612873077393e-10 * (1.0 - 1.1920928955078125e-07))
        # -log1p(-u), by Kahan's correction of the rounding of 1 - u
        rest = 1.0 - u
        time = tl.where(rest == 1.0, u, -tl.log(rest) * u / (1.0 - rest))
        scores = logits / temperature - tl.log(time)
    scores = tl.where(inside, scores, float("-inf"))
    winner = tl.argmax(scores, 0)
    score = tl.max(scores, 0)
    if tl.sum(tl.where(bad & inside, 1, 0), 0) > 0:
        score = float("nan")
    tl.store(scores_ptr + row * blocks + tl.program_id(1), score)
    tl.store(best_ptr + row * blocks + tl.program_id(1), tl.program_id(1) * BLOCK + winner)


@triton.jit
def best_of_blocks(scores_ptr, best_ptr, tokens_ptr, finite_ptr, blocks, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """The best of a row's blocks; the row is finite if no block was NaN and some token is allowed."""
    take_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < blocks
    scores = tl.load(scores_ptr + row * blocks + columns, inside, other=float("-inf"))
    bad = tl.sum(tl.where(scores != scores, 1, 0), 0) > 0
    scores = tl.where(scores != scores, float("-inf"), scores)
    winner = tl.argmax(scores, 0)
    tl.store(tokens_ptr + row, tl.load(best_ptr + row * blocks + winner).to(tl.int64))
    tl.store(finite_ptr + row, (tl.max(scores, 0) > float("-inf")) & (bad == 0))


@triton.jit
def forbid(logits_ptr, masks_ptr, vocab, words, BLOCK: tl.constexpr):
    """Sets -inf where a token's bit is not set, for a block of a row; reads no logits."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    bits = tl.load(masks_ptr + row * words + ids // 32, inside, other=0) >> (ids % 32)
    tl.store(logits_ptr + row * vocab + ids, float("-inf"), inside & ((bits & 1) == 0))
