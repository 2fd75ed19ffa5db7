"""The Triton kernels behind `TritonOps`, and those that lay out a step. One program per token, and per block of it.

Rows of activations are contiguous. Indices into pools and tables are 64 bits wide: those have more than 2^31 elements.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

# Products and sums in one rounding, whatever a release of Triton takes for the default: it warns of its change.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

LOWEST = tl.constexpr(-1e30)
"""Below every score, and finite: differences of two of them are."""


@triton.jit
def matrix_times_vector(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    inputs,
    BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """OUTPUTS elements of weight x x; `inputs` is a multiple of BLOCK."""
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    columns = tl.arange(0, BLOCK)
    rows = weight_ptr + outputs[:, None].to(tl.int64) * inputs
    total = tl.zeros((OUTPUTS, BLOCK), tl.float32)
    for start in range(0, inputs, BLOCK):
        x = tl.load(x_ptr + start + columns).to(tl.float32)
        total += tl.load(rows + start + columns[None, :]).to(tl.float32) * x[None, :]
    result = tl.sum(total, 1)
    if BIAS:
        result += tl.load(bias_ptr + outputs).to(tl.float32)
    tl.store(out_ptr + outputs, result.to(out_ptr.dtype.element_ty))


@triton.jit
def norm(x_ptr, residual_ptr, weight_ptr, out_ptr, size, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """RMS norm of a row; with ADD of its sum with the residual, which the sum replaces."""
    start = tl.program_id(0).to(tl.int64) * size
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    x = tl.load(x_ptr + start + columns, inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + start + columns, inside, other=0.0).to(tl.float32)
        x = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + start + columns, x, inside)
        x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    weight = tl.load(weight_ptr + columns, inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + start + columns, (x * scale * weight).to(out_ptr.dtype.element_ty), inside)


@triton.jit
def gate(gate_up_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """silu(gate) x up, for one block of a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(gate_up_ptr + row * 2 * size + columns, inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * size + size + columns, inside, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * size + columns, out.to(out_ptr.dtype.element_ty), inside)


@triton.jit
def rotate_and_store(
    qkv_ptr, q_ptr, keys_ptr, values_ptr, slots_ptr, cos_ptr, sin_ptr, norm_ptr, unfinite_ptr, eps, key_scale,
    value_scale,
    QUERY: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, NORM: tl.constexpr,
    FP8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of one token's heads: norm and rotation of queries and keys, keys and values into the token's slot.

    Queries go to q, rotated keys also to where they came from. FP8: the slots are e4m3, of numbers over their scale.

    cos and sin (tokens, dim) as `rope_tables` has them: sin carries the sign of the rotation in its first half.
    """
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    half = tl.arange(0, BLOCK_HALF)
    dim: tl.constexpr = 2 * HALF
    inside = (heads[:, None] < QUERY + 2 * KV) & (half[None, :] < HALF)
    first = heads[:, None] * dim + half[None, :]
    base = qkv_ptr + token * (QUERY + 2 * KV) * dim
    low = tl.load(base + first, inside, other=0.0).to(tl.float32)
    high = tl.load(base + first + HALF, inside, other=0.0).to(tl.float32)
    rotated = heads[:, None] < QUERY + KV
    if NORM:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / dim + eps)[:, None]
        weighted = inside & rotated
        low = tl.where(rotated, low * scale * tl.load(norm_ptr + first, weighted, other=1.0).to(tl.float32), low)
        high = tl.where(
            rotated, high * scale * tl.load(norm_ptr + first + HALF, weighted, other=1.0).to(tl.float32), high
        )
    angle = token * dim + half
    cos = tl.load(cos_ptr + angle, half < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + angle + HALF, half < HALF, other=0.0).to(tl.float32)[None, :]
    new_low = tl.where(rotated, low * cos - high * sin, low)
    new_high = tl.where(rotated, high * cos + low * sin, high)

    kind = q_ptr.dtype.element_ty
    to_q = inside & (heads[:, None] < QUERY)
    tl.store(q_ptr + token * QUERY * dim + first, new_low.to(kind), to_q)
    tl.store(q_ptr + token * QUERY * dim + first + HALF, new_high.to(kind), to_q)

    slot = tl.load(slots_ptr + token) * KV * dim
    to_k = inside & (heads[:, None] >= QUERY) & rotated
    to_v = inside & (heads[:, None] >= QUERY + KV)
    tl.store(base + first, new_low.to(kind), to_k)
    tl.store(base + first + HALF, new_high.to(kind), to_k)
    where_k = keys_ptr + slot + first - QUERY * dim
    where_v = values_ptr + slot + first - (QUERY + KV) * dim
    scale = tl.where(rotated, key_scale, value_scale)
    wrong = store(new_low, scale, where_k, to_k, where_v, to_v, FP8)
    wrong += store(new_high, scale, where_k + HALF, to_k, where_v + HALF, to_v, FP8)
    if tl.sum(tl.sum(wrong, 1), 0) > 0:
        tl.store(unfinite_ptr + token, 1)


@triton.jit
def store(x, scale, where_k, to_k, where_v, to_v, FP8: tl.constexpr):
    """Write what of x are keys and values → 1 where it is not finite, 0 elsewhere."""
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
    """x, at most the largest e4m3; NaN where it is not finite, as e4m3 has no infinity."""
    return tl.where(x - x == 0.0, tl.minimum(tl.maximum(x, -448.0), 448.0), float("nan"))


@triton.jit
def mix(x, times: tl.constexpr):
    """The second half of `sampling.noise`'s mixer: x (uint32), already multiplied once."""
    x ^= x >> 15
    x *= times
    return x


@triton.jit
def best_of_block(logits_ptr, temperatures_ptr, keys_ptr, scores_ptr, best_ptr, vocab, blocks, BLOCK: tl.constexpr):
    """The best token of one block of one row: its logit over the temperature, less the logarithm of its arrival time.

    The arrival times are those of `sampling.noise.negative_exponentials`; at temperature 0 there are none. A score of
    NaN stands for logits that are not finite (-inf is, as a token that may not be chosen).
    """
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
def best_of_blocks(scores_ptr, best_ptr, tokens_ptr, finite_ptr, blocks, BLOCK: tl.constexpr):
    """The best of a row's blocks; the row is finite if no block was NaN and some token may be chosen."""
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
def flatten_pages(table_ptr, rows_ptr, indptr_ptr, out_ptr, width, BLOCK: tl.constexpr):
    """out[indptr[i] : indptr[i + 1]] = the first pages of table row rows[i], BLOCK of them in each program."""
    sequence = tl.program_id(0)
    start = tl.load(indptr_ptr + sequence)
    count = tl.load(indptr_ptr + sequence + 1) - start
    row = tl.load(rows_ptr + sequence).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < count
    pages = tl.load(table_ptr + row * width + columns, inside, other=0)
    tl.store(out_ptr + start + columns, pages.to(tl.int32), inside)


@triton.jit
def decode_shares(
    q_ptr, keys_ptr, values_ptr, table_ptr, rows_ptr, lens_ptr, partial_ptr, scores_ptr, scale, value_scale, width,
    sequences, KV: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, SHARES: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_GROUP: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Attention of one KV head's queries over one share of all blocks of all sequences.

    lens: `attention.decode._Plan.lens`. Of each sequence it meets, the share leaves its output in partial[share +
    sequence], a sum that no others have, and the base-2 logarithm of its softmax's denominator in scores.
    """
    head = tl.program_id(0)
    share = tl.program_id(1)
    total = tl.load(lens_ptr + sequences)
    shares = tl.minimum(total, SHARES)  # none is empty
    block = tl.minimum(share * total // shares, total)
    end = tl.minimum((share + 1) * total // shares, total)
    low = 0
    high = sequences
    while low + 1 < high:  # the sequence that the first block belongs to
        middle = (low + high) // 2
        if tl.load(lens_ptr + middle) <= block:
            low = middle
        else:
            high = middle
    sequence = low

    dims = tl.arange(0, BLOCK_DIM)
    group = tl.arange(0, BLOCK_GROUP)
    heads = head * GROUP + group
    wanted = (group[:, None] < GROUP) & (dims[None, :] < DIM)
    while block < end:
        first = tl.load(lens_ptr + sequence)
        last = tl.minimum(tl.load(lens_ptr + sequence + 1), end)
        length = tl.load(lens_ptr + sequences + 1 + sequence)
        row = tl.load(rows_ptr + sequence).to(tl.int64) * width
        q = tl.load(q_ptr + (sequence * KV * GROUP + heads[:, None]) * DIM + dims[None, :], wanted, other=0.0)
        best = tl.full((BLOCK_GROUP,), float("-inf"), tl.float32)
        mass = tl.zeros((BLOCK_GROUP,), tl.float32)
        out = tl.zeros((BLOCK_GROUP, BLOCK_DIM), tl.float32)
        stop = tl.minimum((last - first) * BLOCK, length)
        for start in range((block - first) * BLOCK, stop, BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            seen = tokens < stop
            page = tl.load(table_ptr + row + tokens // PAGE, seen, other=0)
            slot = (page * PAGE + tokens % PAGE) * (KV * DIM) + head * DIM
            k = tl.load(keys_ptr + slot[None, :] + dims[:, None], seen[None, :] & (dims[:, None] < DIM), other=0.0)
            weights = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
            weights = tl.where(seen[None, :], weights, float("-inf"))
            higher = tl.maximum(best, tl.max(weights, 1))
            weights = tl.exp2(weights - higher[:, None])
            fade = tl.exp2(best - higher)
            v = tl.load(values_ptr + slot[:, None] + dims[None, :], seen[:, None] & (dims[None, :] < DIM), other=0.0)
            out = out * fade[:, None] + tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision="ieee")
            mass = mass * fade + tl.sum(weights, 1)
            best = higher
        cell = (share + sequence) * KV * GROUP + heads
        tl.store(partial_ptr + cell[:, None] * DIM + dims[None, :], out * (value_scale / mass[:, None]), wanted)
        tl.store(scores_ptr + cell, best + tl.log2(mass), group < GROUP)
        block = last
        sequence += 1


@triton.jit
def merge_shares(
    partial_ptr,
    scores_ptr,
    lens_ptr,
    out_ptr,
    sequences,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """One head of one sequence: the sum of what `decode_shares` left of it, each part by its share of the softmax."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    total = tl.load(lens_ptr + sequences)
    shares = tl.minimum(total, SHARES)
    # share s has the blocks from s x total / shares on: so block b is in share ceil((b + 1) x shares / total) - 1
    first = ((tl.load(lens_ptr + sequence) + 1) * shares - 1) // total
    last = (tl.load(lens_ptr + sequence + 1) * shares - 1) // total
    dims = tl.arange(0, BLOCK_DIM)
    best = float("-inf")
    mass = 0.0
    out = tl.zeros((BLOCK_DIM,), tl.float32)
    for share in range(first, last + 1):
        cell = (share + sequence) * HEADS + head
        score = tl.load(scores_ptr + cell)
        higher = tl.maximum(best, score)
        fade = tl.exp2(best - higher)
        part = tl.exp2(score - higher)
        out = out * fade + part * tl.load(partial_ptr + cell * DIM + dims, dims < DIM, other=0.0)
        mass = mass * fade + part
        best = higher
    place = (sequence * HEADS + head) * DIM + dims
    tl.store(out_ptr + place, (out / mass).to(out_ptr.dtype.element_ty), dims < DIM)


@triton.jit
def attend(
    q, best, mass, out, keys_ptr, values_ptr, table, head, position, start, stop, end, scale,
    KV: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    """The running softmax of rows of queries over the keys from `start` to `stop`, of which there are `end`.

    With MASK a row sees those up to its position, else all, and none lies behind the end.
    """
    dims = tl.arange(0, BLOCK_DIM)
    inside = dims < DIM
    for first in range(start, stop, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        there = tokens < end
        page = tl.load(table + tokens // PAGE, there, other=0)
        slot = (page * PAGE + tokens % PAGE) * (KV * DIM) + head * DIM
        k = tl.load(keys_ptr + slot[None, :] + dims[:, None], there[None, :] & inside[:, None], other=0.0)
        weights = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
        if MASK:
            weights = tl.where(tokens[None, :] <= position[:, None], weights, float("-inf"))
        higher = tl.maximum(best, tl.max(weights, 1))
        weights = tl.exp2(weights - higher[:, None])
        fade = tl.exp2(best - higher)
        v = tl.load(values_ptr + slot[:, None] + dims[None, :], there[:, None] & inside[None, :], other=0.0)
        out = out * fade[:, None] + tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision="ieee")
        mass = mass * fade + tl.sum(weights, 1)
        best = higher
    return best, mass, out


@triton.jit
def extend(
    q_ptr, keys_ptr, values_ptr, table_ptr, rows_ptr, lens_ptr, blocks_ptr, out_ptr, scores_ptr, scale, value_scale,
    width, sequences, tokens, splits,
    KV: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Attention of TOKENS new tokens of one sequence, the queries of one KV head: a row for each token and query head.

    lens (2 x sequences + 1,): where the new tokens of each sequence begin, and their end; then each one's tokens.
    blocks (blocks, 2): a sequence, and which of its new tokens is the first. All int32.

    With SPLIT this is one of `splits` parts of the keys: out is (splits, tokens, heads, dim) and scores
    (splits, tokens, heads) has the base-2 logarithm of each part's denominator. Else out is (tokens, heads, dim).
    """
    block = blocks_ptr + 2 * tl.program_id(1)
    sequence = tl.load(block)
    first = tl.load(block + 1)
    head = tl.program_id(0)
    query_start = tl.load(lens_ptr + sequence)
    q_len = tl.load(lens_ptr + sequence + 1) - query_start
    cached = tl.load(lens_ptr + sequences + 1 + sequence) - q_len
    table = table_ptr + tl.load(rows_ptr + sequence).to(tl.int64) * width

    row = tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, BLOCK_DIM)
    token = first + row // GROUP
    wanted = (row < TOKENS * GROUP) & (token < q_len)
    cell = (query_start + token).to(tl.int64) * (KV * GROUP) + head * GROUP + row % GROUP
    place = cell[:, None] * DIM + dims[None, :]
    q = tl.load(q_ptr + place, wanted[:, None] & (dims[None, :] < DIM), other=0.0)
    best = tl.full((BLOCK_ROWS,), LOWEST, tl.float32)
    mass = tl.zeros((BLOCK_ROWS,), tl.float32)
    out = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)

    position = cached + token
    end = tl.minimum(cached + q_len, cached + first + TOKENS)
    start = 0
    stop = end
    if SPLIT:
        size = tl.cdiv(tl.cdiv(end, BLOCK), splits) * BLOCK
        start = tl.minimum(tl.program_id(2) * size, end)
        stop = tl.minimum(start + size, end)
    common = tl.maximum(start, tl.minimum(stop, (cached + first + 1) // BLOCK * BLOCK))  # up to there all rows see all
    best, mass, out = attend(
        q, best, mass, out, keys_ptr, values_ptr, table, head, position, start, common, end, scale,
        KV, DIM, PAGE, BLOCK, BLOCK_DIM, MASK=False,
    )  # fmt: skip
    best, mass, out = attend(
        q, best, mass, out, keys_ptr, values_ptr, table, head, position, common, stop, end, scale,
        KV, DIM, PAGE, BLOCK, BLOCK_DIM, MASK=True,
    )  # fmt: skip
    some = tl.where(mass > 0.0, mass, 1.0)  # a part of no keys has none
    if SPLIT:
        part = tl.program_id(2).to(tl.int64) * tokens * (KV * GROUP)
        place += part * DIM
        tl.store(scores_ptr + part + cell, tl.where(mass > 0.0, best + tl.log2(some), float("-inf")), wanted)
    out = out * (value_scale / some[:, None])
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), wanted[:, None] & (dims[None, :] < DIM))


@triton.jit
def merge_splits(partial_ptr, scores_ptr, out_ptr, heads, splits, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """One head of one token: the sum of the parts that `extend` left, each by its share of the softmax."""
    dims = tl.arange(0, BLOCK_DIM)
    cell = tl.program_id(0).to(tl.int64)  # of tokens x heads
    best = LOWEST
    mass = 0.0
    out = tl.zeros((BLOCK_DIM,), tl.float32)
    for split in range(splits):
        at = split * heads + cell
        score = tl.load(scores_ptr + at)
        higher = tl.maximum(best, score)
        fade = tl.exp2(best - higher)
        part = tl.exp2(score - higher)
        out = out * fade + part * tl.load(partial_ptr + at * DIM + dims, dims < DIM, other=0.0)
        mass = mass * fade + part
        best = higher
    tl.store(out_ptr + cell * DIM + dims, (out / mass).to(out_ptr.dtype.element_ty), dims < DIM)
