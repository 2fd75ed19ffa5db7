"""The launch sizes of a mixture of experts, chosen by the host before it knows the routing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from treeline_runtime.ops.fused_experts import TILES, Tile, most_blocks, tile_for


@given(st.lists(st.integers(0, 400), min_size=1, max_size=130).filter(any), st.sampled_from(TILES))
def test_blocks_suffice_however_tokens_are_spread(counts: list[int], tile: Tile) -> None:
    assert sum(-(-count // tile.rows) for count in counts) <= most_blocks(sum(counts), len(counts), tile.rows)


def test_no_more_blocks_are_launched_than_some_spread_needs() -> None:
    assert most_blocks(8, 128, 16) == 8  # each pair alone
    assert most_blocks(64, 2, 16) == 5  # 1 and 63
    assert most_blocks(1, 128, 128) == 1


def test_tiles_grow_with_the_pairs_of_an_expert() -> None:
    rows = [tile_for(pairs, 128).rows for pairs in (8, 128 * 16, 128 * 16 + 1, 128 * 64, 128 * 64 + 1, 1 << 20)]
    assert rows == [16, 16, 64, 64, 128, 128]
