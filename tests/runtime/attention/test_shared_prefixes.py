"""The choice of prefixes that are read together, and their segments."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st
from treeline_runtime.attention.segments import LEAST_BLOCKS, Segments, SharedPrefix, _cut, shared_prefixes


@dataclass
class World:
    pages: npt.NDArray[np.int64]
    rows: list[int]
    kv_lens: npt.NDArray[np.int64]
    page_size: int
    block: int

    def prefixes(self, most: int) -> list[SharedPrefix]:
        return shared_prefixes(
            self.pages, self.rows, self.kv_lens, page_size=self.page_size, block=self.block, most=most
        )

    def pages_of(self, sequence: int, tokens: int) -> list[int]:
        return self.pages[self.rows[sequence], : -(-tokens // self.page_size)].tolist()


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Draw rows of a tree of prefixes, with leftovers behind their ends."""
    page_size, block = draw(st.sampled_from([1, 3, 4, 9])), draw(st.sampled_from([2, 4]))
    kv_lens: list[int] = []
    tables: list[list[int]] = []
    fresh = 0
    for i in range(draw(st.integers(1, 12))):
        common: list[int] = []
        if i and draw(st.integers(0, 3)):
            other = draw(st.integers(0, i - 1))
            tokens = kv_lens[other] * draw(st.integers(1, 4)) // 4
            common = tables[other][: tokens // page_size]  # whole pages are in the tree
        # the last token is its own: it is computed in this step
        length = len(common) * page_size + draw(st.integers(1, 8 * block))
        own = -(-length // page_size) - len(common)
        tables.append([*common, *range(fresh, fresh + own)])
        kv_lens.append(length)
        fresh += own
    rows = draw(st.permutations(range(len(tables) + 1)))[: len(tables)]
    others = np.random.default_rng(draw(st.integers(0, 99)))
    pages = others.integers(0, fresh, (len(tables) + 1, max(map(len, tables)) + 1))
    for row, table in zip(rows, tables, strict=True):
        pages[row, : len(table)] = table
    return World(pages, list(rows), np.array(kv_lens), page_size, block)


@given(worlds(), st.integers(1, 5))
def test_members_share_their_pages_and_keep_a_token(world: World, most: int) -> None:
    prefixes = world.prefixes(most)
    members = [member for prefix in prefixes for member in prefix.members]
    assert len(members) == len(set(members))
    for prefix in prefixes:
        assert 2 <= len(prefix.members) <= most
        assert prefix.blocks >= LEAST_BLOCKS
        tokens = prefix.blocks * world.block
        assert all(tokens < world.kv_lens[member] for member in prefix.members)
        assert len({tuple(world.pages_of(member, tokens)) for member in prefix.members}) == 1
    assert prefixes == world.prefixes(most)


@given(worlds(), st.integers(2, 5))
def test_nothing_is_shared_only_if_no_prefix_is_long_enough(world: World, most: int) -> None:
    if world.prefixes(most):
        return
    for one in range(len(world.rows)):
        for other in range(one):
            blocks = (min(world.kv_lens[one], world.kv_lens[other]) - 1) // world.block
            if blocks >= LEAST_BLOCKS:
                tokens = LEAST_BLOCKS * world.block
                assert world.pages_of(one, tokens) != world.pages_of(other, tokens)


def saved(ranges: list[tuple[int, int]], common: list[int]) -> int:
    return sum((end - first - 1) * min(common[first : end - 1]) - 1 for first, end in ranges)


def every_cut(length: int, most: int, start: int = 0) -> list[list[tuple[int, int]]]:
    if start == length:
        return [[]]
    return [
        ([(start, start + size)] if size > 1 else []) + rest
        for size in range(1, min(most, length - start) + 1)
        for rest in every_cut(length, most, start + size)
    ]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.integers(2, 4))
def test_no_other_cut_of_the_order_saves_more(common: list[int], most: int) -> None:
    allowed = [
        ranges
        for ranges in every_cut(len(common) + 1, most)
        if all(min(common[first : end - 1]) >= LEAST_BLOCKS for first, end in ranges)
    ]
    assert saved(_cut(common, most), common) == max(saved(ranges, common) for ranges in allowed)


def test_longer_prefixes_of_some_win_over_the_common_one() -> None:
    """A system prompt of 4 blocks for 8 sequences, after which each 4 have 16 more in common; tiles of 4."""
    pages = np.arange(8 * 40).reshape(8, 40)
    pages[:, :4] = pages[0, :4]
    for first in (0, 4):
        pages[first : first + 4, :20] = pages[first, :20]
    found = World(pages, list(range(8)), np.full(8, 40 * 16), 16, 16).prefixes(4)
    assert [(sorted(members), blocks) for members, blocks in found] == [([0, 1, 2, 3], 20), ([4, 5, 6, 7], 20)]


@given(worlds(), st.integers(1, 5), st.integers(1, 20), st.integers(0, 2), st.data())
def test_every_token_is_read_once_and_every_result_is_added_up(
    world: World, most: int, shares: int, padding: int, data: st.DataObject
) -> None:
    kv_lens = np.concatenate((world.kv_lens, np.ones(padding, dtype=np.int64)))
    window = data.draw(st.one_of(st.none(), st.integers(1, 40)))
    segments = Segments(len(kv_lens), world.block, world.prefixes(most) if window is None else [])
    kv_lens += data.draw(st.integers(0, 9))  # steps later
    row = np.full(segments.size, -9, dtype=np.int32)
    segments.write(row, kv_lens, shares, window)
    table = row[: segments.members_at].reshape(-1, 4)
    members = row[segments.members_at : segments.parts_at]
    seen = [np.zeros(n, dtype=np.int64) for n in kv_lens]
    left: dict[int, list[int]] = {sequence: [] for sequence in range(len(kv_lens))}
    total = table[-1, 0]
    cells = []
    for (first, begin, end, place), (last, _, _, next_place) in pairwise(table):
        assert last - first == -(-end // world.block) - begin
        begin *= world.block
        blocks = range(first, last)
        cut = min(shares, total)
        within = [s for s in range(cut) if set(blocks) & set(range(s * total // cut, (s + 1) * total // cut))]
        for offset, sequence in enumerate(members[place:next_place]):
            seen[sequence][begin:end] += 1
            left[sequence] += [share * most + place + offset for share in within]
            cells += left[sequence][len(left[sequence]) - len(within) :]
        assert 0 < next_place - place <= most or not blocks
    for sequence, (n, counts) in enumerate(zip(kv_lens, seen, strict=True)):
        assert (counts[max(n - (window or n), 0) :] == 1).all()
        assert counts.max() == 1
        parts = row[segments.parts_at :][6 * sequence : 6 * sequence + 6].reshape(2, 3)
        added = [share * most + place for first, end, place in parts for share in range(first, end)]
        assert sorted(added) == sorted(left[sequence])
    assert len(cells) == len(set(cells))
    assert max(cells) < shares * most + 2 * len(kv_lens)


def test_shares_get_prefixes_and_their_continuations_in_turn() -> None:
    segments = Segments(5, 16, [SharedPrefix([3, 1], 2), SharedPrefix([0, 4], 3)])
    row = np.empty(segments.size, dtype=np.int32)
    segments.write(row, np.array([50, 33, 20, 64, 49]), 1)
    members = row[segments.members_at :]
    table = row[: segments.members_at].reshape(-1, 4)
    found = [(members[a[3] : b[3]].tolist(), 16 * a[1], a[2]) for a, b in pairwise(table)]
    assert found[:6] == [([3, 1], 0, 32), ([3], 32, 64), ([1], 32, 33), ([0, 4], 0, 48), ([0], 48, 50), ([4], 48, 49)]
    assert found[6:] == [([2], 0, 20)]
