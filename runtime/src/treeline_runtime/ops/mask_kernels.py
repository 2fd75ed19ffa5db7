"""Leaving out tokens that a row may not choose."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def forbid(logits_ptr, masks_ptr, vocab, words, BLOCK: tl.constexpr):
    """-inf where a token's bit is not set, for one block of one row; nothing is read of the logits."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    bits = tl.load(masks_ptr + row * words + ids // 32, inside, other=0) >> (ids % 32)
    tl.store(logits_ptr + row * vocab + ids, float("-inf"), inside & ((bits & 1) == 0))
