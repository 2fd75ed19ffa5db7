"""Triton kernels of attention, and one that prepares pages for FlashInfer.

Rows of activations are contiguous. Indices into pools and tables are 64 bits wide: those have more than 2^31 elements.

Numbers that change between steps are not specialized: Triton would compile again when one becomes 1 or a multiple of
16, while requests wait.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treeline_runtime.ops.early_kernels import take_turn

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)
"""Below every score, and finite, so that differences are."""


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
def segment_of(block, table_ptr, segments):
    low = 0
    high = segments
    while low + 1 < high:
        middle = (low + high) // 2
        if tl.load(table_ptr + 4 * middle) <= block:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def capped(scores, cap, CAPPED: tl.constexpr):
    """Scores in base 2. CAPPED: tanh(x) = 2 sigmoid(2 x) - 1; the argument is 2 x, `cap` the cap in base 2."""
    if CAPPED:
        scores = (2.0 * tl.sigmoid(scores) - 1.0) * cap
    return scores


@triton.jit
def share_of_blocks(share, table_ptr, segments, SHARES: tl.constexpr):
    """Returns the segment where a share begins, its first block, and the one after its last."""
    total = tl.load(table_ptr + 4 * segments)
    shares = tl.minimum(total, SHARES)  # none is empty
    block = tl.minimum(share * total // shares, total)
    end = tl.minimum((share + 1) * total // shares, total)
    return segment_of(block, table_ptr, segments), block, end


@triton.jit(do_not_specialize=["segments"])
def decode_shares(
    q_ptr, keys_ptr, values_ptr, pages_ptr, rows_ptr, table_ptr, members_ptr, partial_ptr, scores_ptr, scale,
    value_scale, cap, width, segments,
    KV: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, SHARES: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_GROUP: tl.constexpr,
    BLOCK_DIM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Attention of a KV head's queries over one share of all blocks of all segments: see `attention.segments`.

    A tile's rows are the query heads of a segment's members. For each, the share leaves its output in partial[share x
    most members + place], which nobody else writes, and the base-2 logarithm of its softmax's denominator in scores.
    WINDOW: 0, or the most tokens seen; a segment then begins with the first one's block. e4m3 keys and values have
    their scales in `scale` and `value_scale`.
    """
    take_turn(EARLY)
    head = tl.program_id(0)
    share = tl.program_id(1)
    segment, block, end = share_of_blocks(share, table_ptr, segments, SHARES)
    dims = tl.arange(0, BLOCK_DIM)
    group = tl.arange(0, BLOCK_GROUP)
    while block < end:
        first = tl.load(table_ptr + 4 * segment)
        begin = tl.load(table_ptr + 4 * segment + 1) * BLOCK  # as a product, so that the compiler knows its divisor
        length = tl.load(table_ptr + 4 * segment + 2)
        place = tl.load(table_ptr + 4 * segment + 3)
        last = tl.minimum(tl.load(table_ptr + 4 * segment + 4), end)
        there = group < (tl.load(table_ptr + 4 * segment + 7) - place) * GROUP
        wanted = there[:, None] & (dims[None, :] < DIM)
        # members share the pages, so the first one's are read
        row = tl.load(rows_ptr + tl.load(members_ptr + place)).to(tl.int64) * width
        sequence = tl.load(members_ptr + place + group // GROUP, there, other=0)
        heads = (sequence * KV + head) * GROUP + group % GROUP
        q = tl.load(q_ptr + heads[:, None] * DIM + dims[None, :], wanted, other=0.0)
        best = tl.full((BLOCK_GROUP,), float("-inf"), tl.float32)
        mass = tl.zeros((BLOCK_GROUP,), tl.float32)
        out = tl.zeros((BLOCK_GROUP, BLOCK_DIM), tl.float32)
        oldest = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
        stop = tl.minimum(begin + (last - first) * BLOCK, length)
        for start in range(begin + (block - first) * BLOCK, stop, BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            seen = tokens < stop
            if WINDOW > 0:
                seen &= tokens >= oldest
            page = tl.load(pages_ptr + row + tokens // PAGE, seen, other=0)
            slot = (page * PAGE + tokens % PAGE) * (KV * DIM) + head * DIM
            k = tl.load(keys_ptr + slot[None, :] + dims[:, None], seen[None, :] & (dims[:, None] < DIM), other=0.0)
            weights = capped(tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale, cap, CAPPED)
            weights = tl.where(seen[None, :], weights, float("-inf"))
            higher = tl.maximum(best, tl.max(weights, 1))
            weights = tl.exp2(weights - higher[:, None])
            fade = tl.exp2(best - higher)
            v = tl.load(values_ptr + slot[:, None] + dims[None, :], seen[:, None] & (dims[None, :] < DIM), other=0.0)
            out = out * fade[:, None] + tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision="ieee")
            mass = mass * fade + tl.sum(weights, 1)
            best = higher
        cell = ((share * (BLOCK_GROUP // GROUP) + place + group // GROUP) * KV + head) * GROUP + group % GROUP
        tl.store(partial_ptr + cell[:, None] * DIM + dims[None, :], out * (value_scale / mass[:, None]), wanted)
        tl.store(scores_ptr + cell, best + tl.log2(mass), there)
        block = last
        segment += 1


@triton.jit
def merge_shares(
    partial_ptr, scores_ptr, parts_ptr, sinks_ptr, out_ptr,
    HEADS: tl.constexpr, DIM: tl.constexpr, SHARERS: tl.constexpr, SINKS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """A head of a sequence: merges the parts of `decode_shares` by their shares of the softmax.

    SHARERS: most members of a segment. SINKS: the softmax begins with the head's sink, whose value is zero.
    """
    take_turn(EARLY)
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    dims = tl.arange(0, BLOCK_DIM)
    best = float("-inf")
    mass = 0.0
    if SINKS:
        best = tl.load(sinks_ptr + head) * LOG2_E
        mass = 1.0
    out = tl.zeros((BLOCK_DIM,), tl.float32)
    for part in tl.static_range(2):  # its own segment, and the shared one
        at = parts_ptr + 6 * sequence + 3 * part
        place = tl.load(at + 2)
        for share in range(tl.load(at), tl.load(at + 1)):
            cell = (share * SHARERS + place) * HEADS + head
            score = tl.load(scores_ptr + cell)
            higher = tl.maximum(best, score)
            fade = tl.exp2(best - higher)
            weight = tl.exp2(score - higher)
            out = out * fade + weight * tl.load(partial_ptr + cell * DIM + dims, dims < DIM, other=0.0)
            mass = mass * fade + weight
            best = higher
    place = (sequence * HEADS + head) * DIM + dims
    tl.store(out_ptr + place, (out / mass).to(out_ptr.dtype.element_ty), dims < DIM)


@triton.jit
def attend(
    q, best, mass, out, keys_ptr, values_ptr, table, head, position, start, stop, end, scale, cap,
    KV: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """The running softmax of query rows over the keys from `start` to `stop`, of `end` in all.

    With MASK a row sees keys up to its position, with WINDOW the last so many of these; else all, and none is past the
    end.
    """
    dims = tl.arange(0, BLOCK_DIM)
    inside = dims < DIM
    for first in range(start, stop, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        there = tokens < end
        page = tl.load(table + tokens // PAGE, there, other=0)
        slot = (page * PAGE + tokens % PAGE) * (KV * DIM) + head * DIM
        k = tl.load(keys_ptr + slot[None, :] + dims[:, None], there[None, :] & inside[:, None], other=0.0)
        weights = capped(tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale, cap, CAPPED)
        if MASK:
            seen = tokens[None, :] <= position[:, None]
            if WINDOW > 0:
                seen &= tokens[None, :] >= (position - WINDOW + 1)[:, None]
            weights = tl.where(seen, weights, float("-inf"))
        higher = tl.maximum(best, tl.max(weights, 1))
        weights = tl.exp2(weights - higher[:, None])
        fade = tl.exp2(best - higher)
        v = tl.load(values_ptr + slot[:, None] + dims[None, :], there[:, None] & inside[None, :], other=0.0)
        out = out * fade[:, None] + tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision="ieee")
        mass = mass * fade + tl.sum(weights, 1)
        best = higher
    return best, mass, out


@triton.jit
def key_ranges(
    cached, first, end, splits, TOKENS: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Ranges of this part's keys: the start, where windows are fully inside, where masking begins, and the end."""
    # the block with the oldest token that the first row sees
    start = tl.maximum(cached + first - WINDOW + 1, 0) // BLOCK * BLOCK if WINDOW > 0 else 0
    stop = end
    if SPLIT:
        size = tl.cdiv(tl.cdiv(end - start, BLOCK), splits) * BLOCK
        start = tl.minimum(start + tl.program_id(2) * size, end)
        stop = tl.minimum(start + size, end)
    common = tl.maximum(start, tl.minimum(stop, (cached + first + 1) // BLOCK * BLOCK))
    old = start
    if WINDOW > 0:
        old = tl.cdiv(tl.maximum(cached + first + TOKENS - WINDOW, 0), BLOCK) * BLOCK
        old = tl.minimum(common, tl.maximum(start, old))
    return start, old, common, stop


@triton.jit(do_not_specialize=["sequences", "tokens", "splits"])
def extend(
    q_ptr, keys_ptr, values_ptr, table_ptr, rows_ptr, lens_ptr, blocks_ptr, out_ptr, scores_ptr, sinks_ptr, scale,
    value_scale, cap, width, sequences, tokens, splits,
    KV: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr,
    SPLIT: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Attention of TOKENS new tokens of a sequence, for the queries of a KV head: a row per token and query head.

    lens (2 x sequences + 1,): start of each sequence's new tokens, and their end; then each one's tokens. blocks
    (blocks, 2): sequence, index of its first new token. All int32.

    With SPLIT this is one of `splits` parts of the keys: out is (splits, tokens, heads, dim), and scores (splits,
    tokens, heads) has the base-2 logarithm of each part's denominator. Else out is (tokens, heads, dim).
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
    if SINKS and not SPLIT:  # with split keys, the merging kernel adds the sink
        best = tl.load(sinks_ptr + head * GROUP + row % GROUP) * LOG2_E
        mass += 1.0
    out = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
    position = cached + token
    end = tl.minimum(cached + q_len, cached + first + TOKENS)
    start, old, common, stop = key_ranges(cached, first, end, splits, TOKENS, SPLIT, WINDOW, BLOCK)
    if WINDOW > 0:
        best, mass, out = attend(
            q, best, mass, out, keys_ptr, values_ptr, table, head, position, start, old, end, scale, cap,
            KV, DIM, PAGE, WINDOW, CAPPED, BLOCK, BLOCK_DIM, MASK=True,
        )  # fmt: skip
    best, mass, out = attend(
        q, best, mass, out, keys_ptr, values_ptr, table, head, position, old, common, end, scale, cap,
        KV, DIM, PAGE, WINDOW, CAPPED, BLOCK, BLOCK_DIM, MASK=False,
    )  # fmt: skip
    best, mass, out = attend(
        q, best, mass, out, keys_ptr, values_ptr, table, head, position, common, stop, end, scale, cap,
        KV, DIM, PAGE, WINDOW, CAPPED, BLOCK, BLOCK_DIM, MASK=True,
    )  # fmt: skip
    some = tl.where(mass > 0.0, mass, 1.0)  # a part without keys has no mass
    if SPLIT:
        part = tl.program_id(2).to(tl.int64) * tokens * (KV * GROUP)
        place += part * DIM
        tl.store(scores_ptr + part + cell, tl.where(mass > 0.0, best + tl.log2(some), float("-inf")), wanted)
    out = out * (value_scale / some[:, None])
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), wanted[:, None] & (dims[None, :] < DIM))


@triton.jit(do_not_specialize=["heads", "splits"])
def merge_splits(
    partial_ptr, scores_ptr, sinks_ptr, out_ptr, heads, splits,
    HEADS: tl.constexpr, DIM: tl.constexpr, SINKS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """A head of a token: merges the parts of `extend` by their shares of the softmax."""
    dims = tl.arange(0, BLOCK_DIM)
    cell = tl.program_id(0).to(tl.int64)  # of tokens x heads
    best = LOWEST
    mass = 0.0
    if SINKS:
        best = tl.load(sinks_ptr + cell % HEADS) * LOG2_E
        mass = 1.0
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
