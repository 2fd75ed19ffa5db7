"""The index announces what a router can use, and its snapshot always equals the sum of its events."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.publisher import Cache, Consumer, Cutting, TrustingReencoder
from treeline_runtime.published import Cleared, Copied, Removed, Stored
from treeline_runtime.publisher.announced_index import AnnouncedIndex, parents_first, runs
from treeline_wire.events import AllBlocksCleared, BlockRemoved, BlockStored
from treeline_wire.namespaces import join_namespace


def stored(hashes: list[int], parent: int | None = None, output_from: int | None = None) -> Stored:
    tokens = [token for block in hashes for token in (block * 10, block * 10 + 1)]
    return Stored(hashes, parent, tokens, None, len(tokens) if output_from is None else output_from)


def test_a_run_becomes_one_event_with_its_tokens_and_namespace() -> None:
    index = AnnouncedIndex(TrustingReencoder())
    events = index.apply([Stored([1, 2], None, [10, 11, 20, 21], "salt", 4)])
    assert events == [
        BlockStored(
            block_hashes=[1, 2],
            parent_block_hash=None,
            token_ids=[10, 11, 20, 21],
            block_size=2,
            medium="GPU",
            cache_salt="salt",
        )
    ]


def test_an_event_names_the_adapter_apart_from_the_salt() -> None:
    namespace = join_namespace("poet", "salt")
    (event,) = AnnouncedIndex(TrustingReencoder()).apply([Stored([1], None, [10, 11], namespace, 2)])
    assert isinstance(event, BlockStored)
    assert (event.lora_name, event.cache_salt, event.namespace) == ("poet", namespace, namespace)


def test_announcing_stops_at_the_first_position_not_reencoded() -> None:
    index = AnnouncedIndex(Cutting(at=5))
    (event,) = index.apply([stored([1, 2, 3, 4], output_from=2)])
    assert isinstance(event, BlockStored)
    assert event.block_hashes == [1, 2]
    assert index.announced() == [1, 2]
    assert len(index) == 4


def test_prompt_pages_are_always_announced() -> None:
    index = AnnouncedIndex(Cutting(at=0))
    (event,) = index.apply([stored([1, 2, 3])])
    assert isinstance(event, BlockStored)
    assert event.block_hashes == [1, 2, 3]


def test_nothing_is_announced_below_an_unannounced_page() -> None:
    index = AnnouncedIndex(Cutting(at=2))
    index.apply([stored([1, 2], output_from=0)])
    assert index.announced() == [1]
    assert index.apply([stored([3], parent=2)]) == []
    assert index.apply([stored([4], parent=1)]) != []


def test_removal_of_an_unannounced_page_is_silent() -> None:
    index = AnnouncedIndex(Cutting(at=2))
    index.apply([stored([1, 2], output_from=0)])
    assert index.apply([Removed([2])]) == []
    assert index.apply([Removed([1, 99])]) == [BlockRemoved(block_hashes=[1], medium="GPU")]
    assert len(index) == 0


def test_the_reencoder_sees_the_whole_sequence_and_where_sampling_began() -> None:
    seen: list[tuple[list[int], int]] = []

    class Recorder:
        def agreed_len(self, ids: list[int], sampled_from: int) -> int:
            seen.append((ids, sampled_from))
            return len(ids)

    index = AnnouncedIndex(Recorder())
    index.apply([stored([1]), stored([2, 3], parent=1, output_from=1)])
    assert seen == [([10, 11, 20, 21, 30, 31], 3)]


def test_neighbouring_removals_are_merged_and_a_clear_swallows_what_came_before() -> None:
    index = AnnouncedIndex(TrustingReencoder())
    index.apply([stored([1, 2, 3])])
    assert index.apply([Removed([3]), Removed([2])]) == [BlockRemoved(block_hashes=[3, 2], medium="GPU")]
    assert index.apply([Removed([1]), Cleared()]) == [AllBlocksCleared()]
    assert index.apply([Cleared(), stored([7])])[0] == AllBlocksCleared()
    assert index.announced() == [7]


def test_storing_a_known_page_again_sends_nothing() -> None:
    index = AnnouncedIndex(TrustingReencoder())
    index.apply([stored([1, 2])])
    (event,) = index.apply([stored([1, 2, 3])])
    assert isinstance(event, BlockStored)
    assert (event.block_hashes, event.parent_block_hash) == ([3], 2)


def test_runs_are_cut_at_their_longest() -> None:
    index = AnnouncedIndex(TrustingReencoder())
    index.apply([stored(list(range(1, 11)))])
    cut = list(runs(parents_first(index.pages()["GPU"]), longest=4))
    assert [event.block_hashes for event in cut] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]
    assert [event.parent_block_hash for event in cut] == [None, 4, 8]


@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 10**9), steps=st.integers(1, 60), cut=st.sampled_from([0, 3, 6, 10**6]))
def test_the_snapshot_equals_the_sum_of_the_events(seed: int, steps: int, cut: int) -> None:
    rng = random.Random(seed)
    cache, index, live = Cache(rng), AnnouncedIndex(Cutting(at=cut)), Consumer()
    for _ in range(steps):
        live.apply(index.apply(cache.step()))
        index.check()
        assert set(index.pages()["GPU"]) == set(cache.pages)
        fresh = Consumer()
        fresh.apply(list(runs(parents_first(index.pages()["GPU"]))))
        assert not fresh.orphans, "a page came before its parent"
        assert fresh.pages == live.pages
        assert set(fresh.pages) == set(index.announced())


@pytest.mark.parametrize("order", [[1, 2, 3], [3, 2, 1], [2, 3, 1]])
def test_parents_come_first_in_any_order_of_arrival(order: list[int]) -> None:
    index = AnnouncedIndex(TrustingReencoder())
    index.apply([stored([1, 2, 3])])
    pages = index.pages()["GPU"]
    assert [page.hash for page in parents_first({block: pages[block] for block in order})] == [1, 2, 3]


def test_lower_tiers_announce_copies_of_announced_pages() -> None:
    index = AnnouncedIndex(Cutting(at=5))
    index.apply([stored([1, 2, 3], output_from=2)])
    (copied,) = index.apply([Copied([1, 2, 3, 9], "CPU")])
    assert copied == BlockStored(
        block_hashes=[1, 2], parent_block_hash=None, token_ids=[10, 11, 20, 21], block_size=2, medium="CPU"
    )
    assert index.apply([Copied([1, 2], "CPU")]) == [], "it is known"
    index.check()


def test_a_page_leaves_one_tier_and_stays_in_the_others() -> None:
    index = AnnouncedIndex(TrustingReencoder())
    index.apply([stored([1, 2]), Copied([1, 2], "CPU")])
    assert index.apply([Removed([2, 1])]) == [BlockRemoved(block_hashes=[2, 1], medium="GPU")]
    (copied,) = index.apply([Copied([1, 2], "DISK")])
    assert isinstance(copied, BlockStored)
    assert (copied.medium, copied.token_ids) == ("DISK", [10, 11, 20, 21])
    assert index.apply([Removed([2, 1], "CPU"), Removed([2], "DISK")]) == [
        BlockRemoved(block_hashes=[2, 1], medium="CPU"),
        BlockRemoved(block_hashes=[2], medium="DISK"),
    ]
    assert {medium: set(pages) for medium, pages in index.pages().items()} == {"GPU": set(), "CPU": set(), "DISK": {1}}
    assert index.apply([Cleared()]) == [AllBlocksCleared()]
    assert not any(index.pages().values())
