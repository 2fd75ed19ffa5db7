"""The index: events in, hits out; snapshots, epochs and ageing."""

import random

import pytest
from support.epp_core import KEYS, SCOPE, WIDTH, Prompt, blocks, hit, make_index
from treeline_epp.index.event_filter import Skip, block_texts
from treeline_epp.index.pods import NO_HIT, Hit
from treeline_wire.events import AllBlocksCleared, BlockRemoved, BlockStored
from treeline_wire.keys import escape


def test_a_hit_is_the_run_of_blocks_with_eight_more_bytes() -> None:
    index, (pod, other) = make_index()
    prompt = Prompt.random(1, 20)
    index.apply(pod, prompt.stored(), KEYS)
    longer = prompt.extended(2, 3)
    assert blocks(index, pod, longer) in (18, 19), "the last block counts only if eight more bytes match"
    assert blocks(index, other, longer) == 0
    found = hit(index, pod, longer)
    assert found.end == prompt.end(found.tokens // WIDTH)
    index.check()


def test_pods_of_one_scope_share_blocks_and_texts() -> None:
    index, (first, second) = make_index()
    prompt = Prompt.random(1, 20)
    index.apply(first, prompt.stored(), KEYS)
    size = index.totals()
    index.apply(second, prompt.stored(0, 12), KEYS)
    assert index.totals() == size
    assert blocks(index, first, prompt) > blocks(index, second, prompt) >= 10
    index.apply(first, BlockRemoved(prompt.hashes), KEYS)
    assert blocks(index, first, prompt) == 0
    assert blocks(index, second, prompt) >= 10
    assert index.totals()["blocks"] == 12
    index.check()


def test_scopes_and_namespaces_share_nothing() -> None:
    index, (pod,) = make_index(1)
    other = index.add_pod("other", "other model")
    plain, salted = Prompt.random(1, 9), Prompt.random(1, 9, namespace="salt")
    index.apply(pod, plain.stored(), KEYS)
    assert blocks(index, pod, salted) == 0
    index.apply(pod, salted.stored(), KEYS)
    assert blocks(index, pod, salted) >= 7
    assert index.match("other model", None, plain.key, 0.0).hit(other) == NO_HIT
    index.apply(pod, BlockRemoved(plain.hashes), KEYS)
    assert blocks(index, pod, plain) == 0
    assert blocks(index, pod, salted) >= 7
    index.check()


def test_a_block_without_namespace_goes_where_its_parent_is() -> None:
    index, (pod,) = make_index(1)
    prompt = Prompt.random(1, 9, namespace="salt")
    index.apply(pod, prompt.stored(0, 4), KEYS)
    index.apply(pod, prompt.stored(4, cache_salt=None), KEYS)
    assert blocks(index, pod, prompt) >= 7


def test_without_a_tokenizer_only_predictions_count() -> None:
    index, (pod,) = make_index(1)
    prompt = Prompt.random(1, 9)
    index.apply(pod, prompt.stored(), None)
    assert index.blocks_of(pod) == set()
    assert pod.skipped[Skip.NO_TEXT] == 9
    assert not pod.precise
    index.predict(pod, None, prompt.key, Hit(), now=0.0)
    assert hit(index, pod, prompt, now=60.0).reach == len(prompt.key) - 8


@pytest.mark.parametrize("hashes", [[1, 2, 1], [1, 2, 3]], ids=["a hash twice", "its own parent"])
def test_impossible_chains_are_refused(hashes: list[int]) -> None:
    index, (pod,) = make_index(1)
    event = BlockStored(hashes, 3, list(range(3 * WIDTH)), WIDTH)
    index.apply(pod, event, KEYS)
    assert pod.skipped[Skip.HASHES] == 3
    index.apply(pod, BlockStored([3], None, list(range(WIDTH)), WIDTH), KEYS)
    index.apply(pod, event, KEYS)
    assert pod.skipped[Skip.HASHES] == 6
    assert index.blocks_of(pod) == {3}
    index.check()


def test_one_hash_in_two_namespaces_is_refused() -> None:
    index, (pod,) = make_index(1)
    prompt = Prompt.random(1, 3)
    index.apply(pod, prompt.stored(), KEYS)
    index.apply(pod, prompt.stored(cache_salt="other"), KEYS)
    assert pod.skipped[Skip.NAMESPACE] == 3


def test_token_ids_beyond_the_vocabulary_are_escapes() -> None:
    table = [b"a", b"bc"]
    assert block_texts(table, [0, 1, 7, 0], 2) == [b"abc", escape(7) + b"a"]
    assert block_texts(table, [1], 1) == [b"bc"]


def test_the_index_is_bounded() -> None:
    index, (pod,) = make_index(1, max_blocks=20)
    for seed in range(10):
        index.apply(pod, Prompt.random(seed, 9).stored(), KEYS)
    assert index.totals()["blocks"] == 27
    assert pod.skipped[Skip.FULL] == 63
    index.apply(pod, BlockRemoved(Prompt.random(0, 9).hashes), KEYS)
    index.apply(pod, Prompt.random(5, 9).stored(), KEYS)
    assert index.totals()["blocks"] == 27


def test_an_unknown_removal_is_counted() -> None:
    index, (pod,) = make_index(1)
    index.apply(pod, BlockRemoved([1, 2]), KEYS)
    assert pod.skipped[Skip.UNKNOWN_REMOVAL] == 2
    assert pod.blocks == 0


# Bits: clears, snapshots, ageing


def test_a_scope_that_is_read_by_other_keys_starts_from_nothing() -> None:
    index, (pod, other) = make_index()
    elsewhere = index.add_pod("elsewhere", "another model")
    prompt, asked = Prompt.random(1, 30), b"a conversation that went there before, and goes on"
    for each in (pod, other, elsewhere):
        index.apply(each, prompt.stored(), KEYS)
    index.age(other, 0.0)
    index.begin_snapshot(other)
    index.respell(SCOPE)
    index.check()
    assert (blocks(index, pod, prompt), blocks(index, other, prompt)) == (0, 0)
    assert elsewhere.blocks == 30
    index.predict(pod, None, asked, NO_HIT, now=0.0)
    index.apply(pod, prompt.stored(), None)
    assert pod.skipped == {Skip.NO_TEXT: 30}, "the hashes stand for nothing any more"
    index.tick(60.0)
    assert index.match(SCOPE, None, asked, 60.0).hit(pod).reach > 0, "it lives on history, as one without events"
    index.apply(pod, prompt.stored(), KEYS)
    assert blocks(index, pod, prompt) >= 28
    for one in (pod, other):
        index.remove_pod(one)
    for _ in range(3):
        index.tick(60.0)
    index.check()
    assert index.skipped == {Skip.NO_TEXT: 30}, "what was counted stays counted"


def test_a_cleared_pod_is_forgotten_at_once_and_its_bit_reused_after_the_sweep() -> None:
    index, (pod, other) = make_index()
    prompt = Prompt.random(1, 30)
    for each in (pod, other):
        index.apply(each, prompt.stored(), KEYS)
    old = pod.bit
    index.apply(pod, AllBlocksCleared(), KEYS)
    assert (blocks(index, pod, prompt), pod.blocks) == (0, 0)
    assert blocks(index, other, prompt) >= 28
    index.check()
    index.remove_pod(other)
    for _ in range(3):
        index.tick(0.0)
    assert index.totals()["blocks"] == 0
    assert index.totals()["text_bytes"] == 0
    assert index.add_pod("next", SCOPE).bit in (old, 2)
    index.check()


def test_bits_stay_few_however_often_pods_come_and_go() -> None:
    index, pods = make_index(3, max_edge=11)
    rng = random.Random(0)
    for step in range(300):
        pod = rng.choice(pods)
        index.apply(pod, Prompt.random(rng.randrange(6), 9).stored(), KEYS)
        if rng.random() < 0.4:
            index.apply(pod, AllBlocksCleared(), KEYS)
        index.tick(float(step), budget=20)
    index.check()
    assert max(index._bits.owners) < 1 << 12


def test_only_a_complete_snapshot_replaces_the_state() -> None:
    index, (pod,) = make_index(1)
    old, new = Prompt.random(1, 9), Prompt.random(2, 9)
    index.apply(pod, old.stored(), KEYS)
    index.begin_snapshot(pod)
    index.stage(pod, new.stored(0, 5), KEYS)
    assert blocks(index, pod, old) >= 7
    assert blocks(index, pod, new) == 0
    index.stage(pod, new.stored(5), KEYS)
    index.end_snapshot(pod)
    assert blocks(index, pod, old) == 0
    assert blocks(index, pod, new) >= 7
    assert index.blocks_of(pod) == set(new.hashes)
    assert pod.blocks == 9
    index.check()


def test_a_pod_known_by_a_snapshot_alone_has_a_block_size_and_is_precise() -> None:
    index, (pod,) = make_index(1)
    index.begin_snapshot(pod)
    index.stage(pod, Prompt.random(1, 9).stored(), KEYS)
    index.end_snapshot(pod)
    assert (pod.blocks, pod.block_size) == (9, WIDTH), "as many tokens as the engine holds"
    assert pod.precise


def test_a_dropped_snapshot_leaves_no_trace() -> None:
    index, (pod,) = make_index(1)
    old, new = Prompt.random(1, 9), Prompt.random(2, 9)
    index.apply(pod, old.stored(), KEYS)
    index.begin_snapshot(pod)
    index.stage(pod, new.stored(), KEYS)
    index.drop_snapshot(pod)
    for _ in range(3):
        index.tick(0.0)
    assert index.blocks_of(pod) == set(old.hashes)
    assert index.totals()["blocks"] == 9
    index.check()


def test_aged_blocks_count_and_take_removals_until_they_end() -> None:
    index, (pod,) = make_index(1, aged_life_s=100.0)
    prompt, kept = Prompt.random(1, 20), Prompt.random(2, 9)
    index.apply(pod, prompt.stored(), KEYS)
    index.apply(pod, kept.stored(), KEYS)
    index.age(pod, now=0.0)
    longer = prompt.extended(3, 6)
    index.apply(pod, longer.stored(20), KEYS)
    assert blocks(index, pod, longer) >= 24, "a run may go through aged and new blocks"
    index.apply(pod, BlockRemoved(longer.hashes[18:]), KEYS)
    assert blocks(index, pod, longer) in (17, 18)
    index.apply(pod, kept.stored(), KEYS)
    index.check()
    index.tick(101.0)
    assert blocks(index, pod, longer) == 0
    assert index.blocks_of(pod) == set(kept.hashes)
    index.check()
