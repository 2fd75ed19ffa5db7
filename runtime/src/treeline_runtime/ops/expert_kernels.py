"""Triton kernels of a mixture of experts: routing, sorting by expert, two products.

A *pair* is a token with one of its experts; pair p belongs to token p // top_k. Products are computed in blocks of ROWS
pairs of one expert: `order` holds the pairs block by block, padded with the number of pairs. So each block reads one
expert's weights, and shapes depend only on the number of pairs: nothing waits for the device, and graphs can be
captured, as in fused_moe of vLLM and SGLang.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3e38)
"""Above minus infinity, which marks experts that must not be chosen."""


@triton.jit
def route(
    logits_ptr, scores_ptr, ids_ptr, experts, TOP_K: tl.constexpr, NORMALISE: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The TOP_K largest of a token's softmax; the first of equals."""
    token = tl.program_id(0).to(tl.int64)
    ids = tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + token * experts + ids, ids < experts, other=float("-inf")).to(tl.float32)
    scores = tl.exp(logits - tl.max(logits, 0))
    scores = scores / tl.sum(scores, 0)
    # NaN never beats an allowed choice: ids stay distinct and below `experts`
    rank = tl.where(scores == scores, scores, 0.0)
    left = tl.where(ids < experts, rank, float("-inf"))
    places = tl.arange(0, BLOCK_K)
    best_ids = tl.zeros((BLOCK_K,), tl.int32)
    best_scores = tl.zeros((BLOCK_K,), tl.float32)
    for place in tl.static_range(TOP_K):
        best = tl.argmax(left, 0)
        best_ids = tl.where(places == place, best, best_ids)
        best_scores = tl.where(places == place, tl.sum(tl.where(ids == best, scores, 0.0), 0), best_scores)
        left = tl.where(ids == best, float("-inf"), left)
    if NORMALISE:
        best_scores = best_scores / tl.sum(best_scores, 0)
    tl.store(ids_ptr + token * TOP_K + places, best_ids, places < TOP_K)
    tl.store(scores_ptr + token * TOP_K + places, best_scores, places < TOP_K)


@triton.jit(do_not_specialize=["pairs"])
def count_pairs(ids_ptr, counts_ptr, pairs, BLOCK: tl.constexpr):
    """The number of pairs of this program's expert."""
    expert = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, pairs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += (tl.load(ids_ptr + at, at < pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(total, 0))


@triton.jit(do_not_specialize=["pairs"])
def sort_pairs(
    ids_ptr, counts_ptr, order_ptr, block_experts_ptr, blocks_ptr, pairs, experts, ROWS: tl.constexpr,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Puts the pairs of this program's expert into its blocks, in order; one program writes the number of blocks."""
    expert = tl.program_id(0)
    every = tl.arange(0, EXPERTS)
    counts = tl.load(counts_ptr + every, every < experts, other=0)
    blocks = (counts + ROWS - 1) // ROWS
    first = tl.sum(tl.where(every < expert, blocks, 0), 0)
    end = first + tl.sum(tl.where(every == expert, blocks, 0), 0)
    place = first * ROWS
    for start in range(0, pairs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mine = tl.load(ids_ptr + at, at < pairs, other=-1) == expert
        rank = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(order_ptr + place + rank - 1, at, mine)
        place += tl.sum(mine.to(tl.int32), 0)
    rest = place + tl.arange(0, ROWS)
    tl.store(order_ptr + rest, tl.zeros((ROWS,), tl.int32) + pairs, rest < end * ROWS)
    for block in range(first, end):
        tl.store(block_experts_ptr + block, expert)
    if expert == 0:
        tl.store(blocks_ptr, tl.sum(blocks, 0))


@triton.jit
def block_of_program(blocks, columns, GROUP: tl.constexpr):
    """Returns the blocks of pairs and of columns. GROUP blocks of pairs share the weights of their columns."""
    program = tl.program_id(0)
    group = program // (GROUP * columns)
    first = group * GROUP
    size = tl.minimum(blocks - first, GROUP)
    within = program - first * columns
    return first + within % size, within // size


@triton.jit
def pairs_of_block(order_ptr, block_experts_ptr, block, pairs, SORTED: tl.constexpr, ROWS: tl.constexpr):
    """Returns a block's pairs and expert. Without SORTED: a block per pair, with its expert in `ids`."""
    rows = tl.arange(0, ROWS)
    found = tl.load(order_ptr + block * ROWS + rows) if SORTED else tl.where(rows == 0, block, pairs)
    return found, tl.load(block_experts_ptr + block).to(tl.int64)


@triton.jit(do_not_specialize=["pairs"])
def gate_up(
    x_ptr, weight_ptr, bias_ptr, out_ptr, order_ptr, block_experts_ptr, blocks_ptr, pairs, hidden, inner, alpha, limit,
    TOP_K: tl.constexpr, BIAS: tl.constexpr, CLAMPED: tl.constexpr, SORTED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x (tokens, hidden), weight (experts, 2 x inner, hidden), bias (experts, 2 x inner) → out (pairs, inner).

    Silu of gate times up, or `ClampedGate` with its alpha and limit.
    """
    blocks = tl.load(blocks_ptr) if SORTED else pairs
    column_blocks = tl.cdiv(inner, COLUMNS)
    if tl.program_id(0) >= blocks * column_blocks:
        return
    block, column_block = block_of_program(blocks, column_blocks, GROUP)
    found, expert = pairs_of_block(order_ptr, block_experts_ptr, block, pairs, SORTED, ROWS)
    there = found < pairs
    columns = column_block * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < inner
    steps = tl.arange(0, STEP)
    rows = x_ptr + (found // TOP_K).to(tl.int64)[:, None] * hidden
    weights = weight_ptr + expert * 2 * inner * hidden + columns.to(tl.int64)[None, :] * hidden
    up_after = inner.to(tl.int64) * hidden
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, hidden, STEP):
        at = start + steps
        of_x, of_weights = there[:, None], inside[None, :]
        if not EVEN:
            of_x, of_weights = of_x & (at < hidden)[None, :], of_weights & (at < hidden)[:, None]
        x = tl.load(rows + at[None, :], of_x, other=0.0)
        gates = tl.load(weights + at[:, None], of_weights, other=0.0)
        ups = tl.load(weights + up_after + at[:, None], of_weights, other=0.0)
        gate = tl.dot(x, gates, gate, input_precision=PRECISION)
        up = tl.dot(x, ups, up, input_precision=PRECISION)
    if BIAS:
        biases = bias_ptr + expert * 2 * inner + columns
        gate += tl.load(biases, inside, other=0.0).to(tl.float32)[None, :]
        up += tl.load(biases + inner, inside, other=0.0).to(tl.float32)[None, :]
    if CLAMPED:  # NaN stays what it is
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
        result = (up + 1.0) * gate * tl.sigmoid(alpha * gate)
    else:
        result = gate * tl.sigmoid(gate) * up
    out = out_ptr + found.to(tl.int64)[:, None] * inner + columns[None, :]
    tl.store(out, result.to(out_ptr.dtype.element_ty), there[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["pairs"])
def down(
    x_ptr, weight_ptr, bias_ptr, scores_ptr, out_ptr, order_ptr, block_experts_ptr, blocks_ptr, pairs, hidden, inner,
    BIAS: tl.constexpr, SORTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    EVEN: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x (pairs, inner), weight (experts, hidden, inner), bias (experts, hidden) → out (pairs, hidden), times scores."""
    blocks = tl.load(blocks_ptr) if SORTED else pairs
    column_blocks = tl.cdiv(hidden, COLUMNS)
    if tl.program_id(0) >= blocks * column_blocks:
        return
    block, column_block = block_of_program(blocks, column_blocks, GROUP)
    found, expert = pairs_of_block(order_ptr, block_experts_ptr, block, pairs, SORTED, ROWS)
    there = found < pairs
    columns = column_block * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < hidden
    steps = tl.arange(0, STEP)
    rows = x_ptr + found.to(tl.int64)[:, None] * inner
    weights = weight_ptr + expert * hidden * inner + columns.to(tl.int64)[None, :] * inner
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, inner, STEP):
        at = start + steps
        of_x, of_weights = there[:, None], inside[None, :]
        if not EVEN:
            of_x, of_weights = of_x & (at < inner)[None, :], of_weights & (at < inner)[:, None]
        x = tl.load(rows + at[None, :], of_x, other=0.0)
        part = tl.load(weights + at[:, None], of_weights, other=0.0)
        total = tl.dot(x, part, total, input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias_ptr + expert * hidden + columns, inside, other=0.0).to(tl.float32)[None, :]
    scores = tl.load(scores_ptr + found, there, other=0.0)
    out = out_ptr + found.to(tl.int64)[:, None] * hidden + columns[None, :]
    tl.store(out, (total * scores[:, None]).to(out_ptr.dtype.element_ty), there[:, None] & inside[None, :])
