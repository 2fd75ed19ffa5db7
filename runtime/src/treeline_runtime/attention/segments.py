"""Segments that decode attention reads: a prefix shared by several sequences, or the rest of one sequence.

Sequences share a prefix if their rows of the page table name the same pages, as the radix cache makes of equal
beginnings. At most as many read together as fit into a kernel's tile of queries. Each reads at most one shared prefix,
and the rest by itself: cascade attention (https://flashinfer.ai/2024/02/02/cascade-inference.html) with one level.

All of it is one row of int32, refreshed by one copy per step. Its size and the places of its three parts, each aligned
to 16 bytes, depend only on the number of sequences:

    table (most segments + 1, 4)   its first block among all, that block's place in its sequences (in blocks), the token
                                   after its last, and where its members begin; segments without blocks fill it
    members (2 x sequences,)       sequences, segment by segment
    parts (sequences, 2, 3)        of its own segment, and of the shared one: the first share with a part of it, the one
                                   after the last, and its place among the members; no shares if nothing is shared
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

LEAST_BLOCKS = 2
"""A shorter prefix does not pay."""
_BEGINNING = 1
"""The overhead of reading a prefix, in blocks: a program begins with it and leaves a result."""
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
    """Shared prefixes of whole blocks, for up to `most` members, that minimize the blocks read. A sequence is in at
    most one and keeps at least its last token to itself. Prefixes with a common beginning are neighbours.

    pages: the page table; sequence i has row rows[i], valid for its kv_lens[i] tokens. The same page must have the same
    pages before it in all rows, as in a prefix tree: only pages at block ends are compared.
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
    """common: blocks that each sequence shares with the next → ranges of at most `most` that save the most blocks, by
    dynamic programming in sequences x most steps."""
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


def _aligned(size: int) -> int:
    return -(-size // 4) * 4


class Segments:
    """The segments of a batch and its shared prefixes, for as many steps as these stay the same."""

    def __init__(self, sequences: int, block: int, prefixes: Sequence[SharedPrefix] = ()) -> None:
        """block: tokens. prefixes: with members below `sequences`, each in at most one."""
        self.sequences = sequences
        self.most = sequences + sequences // 2
        """Segments; a shared one has two members at least."""
        self.members_at = 4 * (self.most + 1)
        self.parts_at = self.members_at + _aligned(2 * sequences)
        self.size = self.parts_at + _aligned(6 * sequences)
        self._block = block
        self._fixed = np.zeros(self.size, dtype=np.int32)
        table, parts = self._table(self._fixed), self._parts(self._fixed)
        sharers = [member for prefix in prefixes for member in prefix.members]
        alone = np.ones(sequences, dtype=np.bool_)
        alone[sharers] = False
        # a prefix is followed by its members' own segments, so that each share of the blocks gets some of both
        each = [members for prefix in prefixes for members in (prefix.members, *zip(prefix.members))]
        sizes = np.array([len(members) for members in each] + [1] * int(alone.sum()), dtype=np.int64)
        members = np.concatenate((np.array(list(chain.from_iterable(each)), dtype=np.int64), np.flatnonzero(alone)))
        self._fixed[self.members_at : self.members_at + len(members)] = members
        np.cumsum(sizes, out=table[1 : len(sizes) + 1, 3])
        table[len(sizes) + 1 :, 3] = len(members)
        segment = np.repeat(np.arange(len(sizes)), sizes)
        """The segment of each place among the members."""
        own, shared = np.flatnonzero(sizes[segment] == 1), np.flatnonzero(sizes[segment] > 1)
        parts[members[own], 0, 2], parts[members[shared], 1, 2] = own, shared
        self._own = np.empty(sequences, dtype=np.int64)
        """Each sequence's own segment."""
        self._own[members[own]] = segment[own]
        self._sharers, self._shared = members[shared], segment[shared]
        """The sequences that share a prefix, and the segment of each one's prefix."""
        common = np.array([prefix.blocks for prefix in prefixes for _ in prefix.members], dtype=np.int64)
        table[self._shared, 2], table[self._own[self._sharers], 1] = common * block, common

    def _table(self, row: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        return row[: self.members_at].reshape(-1, 4)

    def _parts(self, row: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        return row[self.parts_at : self.parts_at + 6 * self.sequences].reshape(-1, 2, 3)

    def write(
        self,
        row: npt.NDArray[np.int32],
        kv_lens: npt.NDArray[np.int64],
        shares: int,
        window: int | None = None,
    ) -> None:
        """Fills `row` (size,) for a step with sequences of these lengths. All blocks are cut into `shares`, or one each
        if they are fewer. window: how many tokens are seen; windows share no prefix."""
        assert window is None or not len(self._shared)
        row[:] = self._fixed
        table, parts = self._table(row), self._parts(row)
        table[self._own, 2] = kv_lens
        if window is not None:
            table[self._own, 1] = np.maximum(kv_lens - window, 0) // self._block
        begins = np.zeros(self.most + 1, dtype=np.int64)
        np.cumsum(-(-table[:-1, 2] // self._block) - table[:-1, 1], out=begins[1:])
        table[:, 0] = begins
        total = int(begins[-1])
        shares = min(shares, total)
        # share s has the blocks from s x total // shares on: block b is in share ceil((b + 1) x shares / total) - 1
        of_block = (begins * shares - 1) // total
        first, end = (begins[:-1] * shares + shares - 1) // total, of_block[1:] + 1
        parts[:, 0, 0], parts[:, 0, 1] = first[self._own], end[self._own]
        parts[self._sharers, 1, 0], parts[self._sharers, 1, 1] = first[self._shared], end[self._shared]
