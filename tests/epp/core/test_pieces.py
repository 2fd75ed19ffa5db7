"""Large events, applied in pieces, have the effect of the whole."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.epp_core import KEYS, WIDTH, Prompt
from treeline_epp.index.index import Index
from treeline_epp.index.limits import SLICE, weight
from treeline_epp.kvevents import reading as module
from treeline_epp.kvevents.reading import in_pieces, pieces
from treeline_wire.events import AllBlocksCleared, BlockRemoved, BlockStored, Event


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["store", "remove", "copies", "salted", "clear"]),
            st.integers(0, 3),
            st.integers(0, 20),
            st.integers(1, 20),
            st.randoms(use_true_random=False),
        ),
        max_size=12,
    )
)
def test_pieces_give_the_same_index_as_the_whole_event(steps: list[tuple[str, int, int, int, Any]]) -> None:
    prompts = [Prompt.random(seed, 40, namespace="s" if seed == 3 else None) for seed in range(4)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "STORED", 3)
        patch.setattr(module, "REMOVED", 3)
        whole, cut = Index(), Index()
        pods = whole.add_pod("p", "m"), cut.add_pod("p", "m")
        for what, number, start, count, rng in steps:
            prompt = prompts[number]
            hashes = prompt.hashes[start : start + count]
            event: Event
            if what == "clear":
                event = AllBlocksCleared()
            elif what in ("remove", "copies"):
                rng.shuffle(hashes)
                left = [rng.randrange(2) for _ in hashes] if what == "copies" else None
                event = BlockRemoved(hashes, remaining_copy_counts=left)
            else:
                event = prompt.stored(start, start + count)
                if what == "salted":
                    event = msgspec.structs.replace(event, extra_keys=[None] * len(event.block_hashes))
            whole.apply(pods[0], event, KEYS)
            for piece in pieces(event):
                assert isinstance(piece, AllBlocksCleared) or len(piece.block_hashes) <= 3
                cut.apply(pods[1], piece, KEYS)
            assert whole.blocks_of(pods[0]) == cut.blocks_of(pods[1])
            assert pods[0].blocks == pods[1].blocks
        whole.check()
        cut.check()


MANY = list(range(1, 1000))


@pytest.mark.parametrize(
    "event",
    [
        BlockStored(MANY, None, MANY, 1),
        BlockStored(MANY, None, MANY * 100, 100),
        BlockStored(MANY, 7000, [1] * 7, 16),
        BlockStored(MANY, None, [], 0),
        BlockStored(MANY, None, MANY, 1, extra_keys=[None]),
        BlockStored([1], None, [1] * 100_000, 100_000),
        BlockRemoved(MANY),
        BlockRemoved(MANY, remaining_copy_counts=[0]),
    ],
    ids=lambda event: type(event).__name__,
)
def test_no_piece_is_larger_than_a_slice(event: Event) -> None:
    cut = list(pieces(event))
    assert max(map(weight, cut)) <= SLICE + weight(BlockRemoved([]))
    hashes = [block for piece in cut if not isinstance(piece, AllBlocksCleared) for block in piece.block_hashes]
    assert not isinstance(event, AllBlocksCleared)
    assert hashes == event.block_hashes
    if isinstance(event, BlockStored):
        stored = [piece for piece in cut if isinstance(piece, BlockStored)]
        parents = [event.parent_block_hash, *(piece.block_hashes[-1] for piece in stored)]
        assert [piece.parent_block_hash for piece in stored] == parents[:-1], "one chain"


def test_small_events_are_not_split() -> None:
    for event in (BlockStored([1, 2], None, [3, 4], 1), BlockRemoved([1, 2]), AllBlocksCleared()):
        assert list(pieces(event)) == [event]


def test_blocks_without_token_ranges_match_only_if_known() -> None:
    prompt = Prompt.random(1, 300)
    index = Index()
    pods = index.add_pod("p", "m"), index.add_pod("q", "m")
    index.apply(pods[0], prompt.stored(), KEYS)
    masked = BlockStored(prompt.hashes, None, prompt.tokens[:-1], WIDTH)
    for piece in pieces(masked):
        index.apply(pods[1], piece, KEYS)
    assert index.blocks_of(pods[1]) == set(prompt.hashes)
    for piece in pieces(BlockStored([*prompt.hashes[:-1], 5], None, prompt.tokens[:-1], WIDTH)):
        index.apply(pods[1], piece, KEYS)
    assert 5 not in index.blocks_of(pods[1])


def test_blocks_cleared_in_the_same_batch_cost_no_work() -> None:
    before, after = Prompt.random(1, 2).stored(), Prompt.random(2, 2).stored()
    clear = AllBlocksCleared()
    assert in_pieces([before, clear, clear, before, clear, after]) == [clear, after]
    assert in_pieces([before, after]) == [before, after]
    assert in_pieces([]) == []
