"""Which sequences of a decode step are to read their common beginning together.

Sequences share a prefix where their rows of the page table name the same pages, which is what the radix cache makes of
equal beginnings. At most so many can read at once as fit into a kernel's tile of queries, and each reads one prefix
with others and the rest by itself: the idea of cascade attention
(https://flashinfer.ai/2024/02/02/cascade-inference.html) with one level.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

LEAST_BLOCKS = 2
"""A shorter prefix is not worth it."""
_BEGINNING = 1
"""Blocks: what reading a prefix costs besides, since a program begins with it and leaves a result."""
_NONE = -1


class SharedPrefix(NamedTuple):
    members: list[int]
    """Sequences, at least 2."""
    blocks: int


def shared_prefixes(
    pages: npt.NDArray[np.int64],
    rows: list[int],
    kv_lens: npt.NDArray[np.int64],
    *,
    page_size: int,
    block: int,
    most: int,
) -> list[SharedPrefix]:
    """Prefixes of whole blocks for up to `most` members, in which fewest blocks are read; a sequence is in one at most,
    and keeps at least its last token to itself. Those with a beginning in common are neighbours.

    pages: the page table, of which sequence i has row rows[i], valid as far as its kv_lens[i] tokens. A page is to have
    the same pages before it in all rows, as in a tree of prefixes: only those at the ends of blocks are looked at.
    """
    whole = (kv_lens - 1) // block
    candidates = np.flatnonzero(whole >= LEAST_BLOCKS)
    if most < 2 or len(candidates) < 2:
        return []
    table_rows = np.asarray(rows)[candidates]
    early = pages[table_rows, (LEAST_BLOCKS * block - 1) // page_size]
    _, which, counts = np.unique(early, return_inverse=True, return_counts=True)
    several = counts[which] > 1
    if not several.any():
        return []
    candidates, table_rows = candidates[several], table_rows[several]
    whole = whole[candidates]
    last_pages = (np.arange(1, whole.max() + 1) * block - 1) // page_size
    ends = pages[table_rows[:, None], last_pages]
    ends[np.arange(len(last_pages)) >= whole[:, None]] = _NONE
    # any order in which equal beginnings are neighbours: that of bytes is one
    order = np.argsort(ends.view(f"V{ends.shape[1] * ends.itemsize}")[:, 0], kind="stable")
    ends = ends[order]
    differ = (ends[1:] != ends[:-1]) | (ends[1:] == _NONE)
    common = np.where(differ.any(1), differ.argmax(1), differ.shape[1])
    members = candidates[order].tolist()
    return [
        SharedPrefix(members[first:end], int(common[first : end - 1].min()))
        for first, end in _cut(common.tolist(), most)
    ]


def _cut(common: list[int], most: int) -> list[tuple[int, int]]:
    """common: blocks that each of the sequences in order shares with the next → ranges of at most `most` that save the
    most blocks, by dynamic programming. Takes sequences x most steps."""
    saved, sizes = [0], [0]
    for end in range(1, len(common) + 2):
        best, size, blocks = saved[-1], 1, common[end - 2]
        for first in range(end - 2, max(end - most, 0) - 1, -1):
            blocks = min(blocks, common[first])
            if blocks < LEAST_BLOCKS:
                break
            members = end - first
            saves = saved[first] + (members - 1) * blocks - _BEGINNING
            if saves > best:
                best, size = saves, members
        saved.append(best)
        sizes.append(size)
    ranges = []
    end = len(common) + 1
    while end > 0:
        if sizes[end] > 1:
            ranges.append((end - sizes[end], end))
        end -= sizes[end]
    return ranges[::-1]
