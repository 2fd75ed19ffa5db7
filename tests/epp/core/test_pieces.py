"""Large events in pieces do what they do whole."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.epp_core import KEYS, Prompt
from treeline_epp.index.index import Index
from treeline_epp.kvevents import pieces as module
from treeline_epp.kvevents.pieces import PIECE, pieces
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
def test_the_index_is_the_same(steps: list[tuple[str, int, int, int, Any]]) -> None:
    prompts = [Prompt.random(seed, 40, namespace="s" if seed == 3 else None) for seed in range(4)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE", 3)
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


def test_what_does_not_say_which_tokens_are_whose_stays_whole() -> None:
    many = list(range(1, PIECE + 2))
    for event in (
        BlockStored(many, None, [1] * 7, 16),
        BlockStored(many, None, [], 0),
        BlockStored(many, None, many, 1, extra_keys=[None]),
        BlockStored(many[:PIECE], None, many[:PIECE], 1),
        AllBlocksCleared(),
    ):
        assert list(pieces(event)) == [event]
    (first, second) = pieces(BlockStored(many, 99, many, 1))
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert (first.parent_block_hash, second.parent_block_hash) == (99, PIECE)
    assert (second.block_hashes, second.token_ids) == ([PIECE + 1], [PIECE + 1])
