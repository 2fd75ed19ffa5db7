"""The index and the traps of foreign engines' events."""

import random
from itertools import pairwise

import pytest
from support.epp_core import KEYS, WIDTH, Prompt, blocks, make_index
from treeline_epp.index.event_filter import Skip
from treeline_epp.index.pods import NO_HIT
from treeline_wire.events import AllBlocksCleared, BlockRemoved, BlockStored
from treeline_wire.namespaces import join_namespace

# The traps of foreign engines, by the number that the reference on KV events gives them. 1 and 11 are the decoder's; 7
# is in test_subscription; 8 (a clear that idle engines announce late) cannot be seen from here, audits catch it; 14 is
# in test_picker.


def test_trap_2_remaining_copy_counts_are_trusted() -> None:
    index, (pod,) = make_index(1)
    prompt = Prompt.random(1, 3)
    index.apply(pod, prompt.stored(), KEYS)
    index.apply(pod, BlockRemoved(prompt.hashes, remaining_copy_counts=[0, 1, 0]), KEYS)
    assert index.blocks_of(pod) == {prompt.hashes[1]}


def test_trap_2_each_announced_copy_takes_a_removal() -> None:
    index, (pod, other) = make_index()
    prompt = Prompt.random(1, 9)
    index.apply(other, prompt.stored(), KEYS)
    for part in (prompt.stored(), prompt.stored(2, 5), prompt.stored(3)):
        index.apply(pod, part, KEYS)
    for copies in range(3, 0, -1):
        assert prompt.hashes[3] in index.blocks_of(pod), copies
        index.apply(pod, BlockRemoved([prompt.hashes[3]]), KEYS)
    assert index.blocks_of(pod) == {*prompt.hashes} - {prompt.hashes[3]}
    assert index.blocks_of(other) == {*prompt.hashes}, "copies are counted for each pod"
    index.apply(pod, BlockRemoved([prompt.hashes[4]], medium="CPU"), KEYS)
    index.apply(pod, BlockRemoved([prompt.hashes[4]], group_idx=7), KEYS)
    index.apply(pod, BlockRemoved([prompt.hashes[4]]), KEYS)
    index.apply(pod, BlockRemoved([prompt.hashes[4]]), KEYS)
    assert prompt.hashes[4] in index.blocks_of(pod), "three copies, of which other tiers and groups take none"
    index.check()


def test_trap_2_copies_of_orphans_count_too() -> None:
    index, (pod,) = make_index(1)
    prompt = Prompt.random(1, 9)
    for _ in range(2):
        index.apply(pod, prompt.stored(4), KEYS)
    index.apply(pod, BlockRemoved(prompt.hashes[6:]), KEYS)
    index.apply(pod, prompt.stored(0, 4), KEYS)
    assert index.blocks_of(pod) == {*prompt.hashes}
    index.apply(pod, BlockRemoved(prompt.hashes[6:]), KEYS)
    assert index.blocks_of(pod) == {*prompt.hashes[:6]}
    index.check()


def test_trap_2_a_gap_resets_the_count_of_copies() -> None:
    index, (pod,) = make_index(1)
    prompt = Prompt.random(1, 9)
    for _ in range(2):
        index.apply(pod, prompt.stored(), KEYS)
    index.age(pod, now=0.0)  # removals were lost, and announcements
    index.apply(pod, prompt.stored(), KEYS)
    index.apply(pod, BlockRemoved(prompt.hashes), KEYS)
    assert index.blocks_of(pod) == set()
    index.check()


def test_trap_3_a_snapshot_counts_no_copies() -> None:
    index, (pod,) = make_index(1)
    prompt = Prompt.random(1, 9)
    index.apply(pod, prompt.stored(), KEYS)
    index.begin_snapshot(pod)
    for _ in range(2):
        index.stage(pod, prompt.stored(), KEYS)
    index.end_snapshot(pod)
    assert not pod.copies
    index.apply(pod, BlockRemoved(prompt.hashes), KEYS)
    assert index.blocks_of(pod) == set()


def test_trap_4_tokens_that_do_not_fit_the_blocks_are_not_sliced() -> None:
    index, (pod, other) = make_index()
    prompt = Prompt.random(1, 9)
    masked = BlockStored(prompt.hashes[:4], None, prompt.tokens, WIDTH)
    index.apply(pod, masked, KEYS)
    assert index.blocks_of(pod) == set()
    assert pod.skipped[Skip.NO_TEXT] == 4
    index.apply(other, prompt.stored(), KEYS)
    index.apply(pod, masked, KEYS)
    assert index.blocks_of(pod) == set(prompt.hashes[:4]), "known by hash, once another pod gave the text"
    index.check()


def test_trap_4_masked_blocks_leave_a_gap_that_is_not_credited() -> None:
    index, (pod, other) = make_index()
    prompt = Prompt.random(1, 9)
    index.apply(other, prompt.stored(), KEYS)
    shown = [prompt.hashes[at] for at in (0, 1, 4, 5)]
    index.apply(pod, BlockStored(shown, None, prompt.tokens[: 6 * WIDTH], WIDTH), KEYS)
    assert index.blocks_of(pod) == {*shown}
    assert blocks(index, pod, prompt) == 2
    index.apply(pod, prompt.stored(2, 4), KEYS)
    assert blocks(index, pod, prompt) == 6
    index.apply(pod, BlockRemoved(shown), KEYS)
    assert index.blocks_of(pod) == {*prompt.hashes[2:4]}
    index.check()


def test_trap_4_a_masked_beginning_is_no_first_block() -> None:
    """Its parent is nil since the span begins with the prompt; `extra_keys` has entries for the shown blocks alone."""
    index, (pod, other) = make_index()
    prompt = Prompt.random(1, 9, namespace="salt")
    salt = [["salt"], *[None] * 8]
    index.apply(other, prompt.stored(cache_salt=None, extra_keys=salt), KEYS)
    masked = BlockStored(prompt.hashes[3:6], None, prompt.tokens[: 6 * WIDTH], WIDTH, extra_keys=[None] * 3)
    index.apply(pod, masked, KEYS)
    assert blocks(index, pod, prompt) == 0
    assert index.match("model", None, prompt.key, 0.0).hit(pod) == NO_HIT
    index.check()


def test_trap_5_only_the_first_full_attention_group_decides() -> None:
    index, (pod,) = make_index(1)
    prompt = Prompt.random(1, 9)
    index.apply(pod, prompt.stored(group_idx=1, kv_cache_spec_kind="sliding_window"), KEYS)
    assert index.blocks_of(pod) == set()
    index.apply(pod, prompt.stored(group_idx=0, kv_cache_spec_kind="full_attention"), KEYS)
    index.apply(pod, prompt.stored(group_idx=2, kv_cache_spec_kind="full_attention"), KEYS)
    index.apply(pod, BlockRemoved(prompt.hashes, group_idx=1), KEYS)
    assert index.blocks_of(pod) == set(prompt.hashes)
    assert pod.skipped[Skip.GROUP] == 27
    index.apply(pod, BlockRemoved(prompt.hashes, group_idx=0), KEYS)
    assert index.blocks_of(pod) == set()


def test_traps_6_and_13_lower_tiers_are_distinguished_in_any_spelling() -> None:
    index, (pod,) = make_index(1)
    prompt = Prompt.random(1, 9)
    for medium in ("CPU", "cpu", "CPU_PINNED", "DISK", "STORAGE", "EXTERNAL"):
        index.apply(pod, BlockStored(prompt.hashes, None, [], 0, medium=medium), KEYS)
    assert index.blocks_of(pod) == set()
    index.apply(pod, prompt.stored(medium="gpu"), KEYS)
    index.apply(pod, BlockRemoved(prompt.hashes, medium="CPU"), KEYS)
    assert index.blocks_of(pod) == set(prompt.hashes)
    index.apply(pod, BlockRemoved(prompt.hashes, medium="GPU"), KEYS)
    assert index.blocks_of(pod) == set()


def test_trap_9_descendants_stay_when_an_ancestor_goes_and_count_again_when_it_returns() -> None:
    index, (pod,) = make_index(1)
    prompt = Prompt.random(1, 9)
    index.apply(pod, prompt.stored(), KEYS)
    index.apply(pod, BlockRemoved([prompt.hashes[3]]), KEYS)
    assert blocks(index, pod, prompt) == 3
    index.apply(pod, prompt.stored(3, 4), KEYS)
    assert blocks(index, pod, prompt) >= 7
    index.check()


@pytest.mark.parametrize("seed", range(20))
def test_trap_10_order_of_arrival_does_not_matter(seed: int) -> None:
    rng = random.Random(seed)
    index, (pod,) = make_index(1, max_edge=7)
    prompt = Prompt.random(seed, 12)
    cuts = [0, *sorted(rng.sample(range(1, 12), 4)), 12]
    pieces = [prompt.stored(a, b) for a, b in pairwise(cuts)]
    rng.shuffle(pieces)
    gone = []
    for number, piece in enumerate(pieces):
        index.apply(pod, piece, KEYS)
        assert piece.block_hashes[0] in index.blocks_of(pod), "also while it waits for its parent"
        if not gone and number >= 2 and len(piece.block_hashes) > 1:
            gone = [rng.choice(piece.block_hashes[:-1])]
            index.apply(pod, BlockRemoved(gone), KEYS)
    assert index.blocks_of(pod) == set(prompt.hashes) - set(gone)
    assert pod.blocks == 12 - len(gone)
    assert index.totals()["orphan_blocks"] == 0
    expected = prompt.hashes.index(gone[0]) if gone else 12
    assert expected - 4 <= blocks(index, pod, prompt) <= expected
    index.check()


def test_trap_10_an_orphan_removed_before_its_graft_still_carries_its_descendants() -> None:
    index, (pod,) = make_index(1)
    prompt = Prompt.random(1, 12)
    index.apply(pod, prompt.stored(4, 8), KEYS)
    index.apply(pod, prompt.stored(8), KEYS)
    index.apply(pod, BlockRemoved([prompt.hashes[7]]), KEYS)
    index.apply(pod, prompt.stored(0, 4), KEYS)
    assert index.blocks_of(pod) == set(prompt.hashes) - {prompt.hashes[7]}
    assert index.totals()["orphan_blocks"] == 0
    assert blocks(index, pod, prompt) == 7
    index.apply(pod, prompt.stored(7, 8), KEYS)
    assert blocks(index, pod, prompt) >= 10
    index.check()


def test_trap_10_orphans_are_bounded() -> None:
    index, (pod,) = make_index(1, max_orphan_blocks=20)
    for seed in range(10):
        index.apply(pod, Prompt.random(seed, 9).stored(4), KEYS)
    assert index.totals()["orphan_blocks"] == 20
    assert index.totals()["orphan_blocks_dropped"] == 30
    index.check()


def test_trap_10_orphans_keep_waiting_for_a_parent_announced_but_not_stored() -> None:
    index, (pod, other) = make_index()
    prompt = Prompt.random(1, 12)
    index.apply(pod, prompt.stored(0, 4), KEYS)
    index.apply(pod, prompt.stored(8), KEYS)
    index.apply(other, prompt.stored(4, 8), None)
    assert other.skipped[Skip.NO_TEXT] == 4
    assert index.totals()["orphan_blocks"] == 4
    assert blocks(index, pod, prompt) in (3, 4)
    index.apply(pod, prompt.stored(4, 8), KEYS)
    assert index.totals()["orphan_blocks"] == 0
    assert blocks(index, pod, prompt) >= 11
    index.check()


def test_orphans_are_forgotten_with_their_pod() -> None:
    index, (pod, other) = make_index()
    prompt = Prompt.random(1, 9)
    index.apply(pod, prompt.stored(4), KEYS)
    index.apply(pod, AllBlocksCleared(), KEYS)
    index.apply(other, prompt.stored(0, 4), KEYS)
    assert index.blocks_of(pod) == set()
    assert index.totals()["blocks"] == 4
    index.check()


def test_trap_12_pods_with_hash_seeds_of_their_own_still_match() -> None:
    index, pods = make_index(5)
    base = Prompt.random(1, 40)
    for number, pod in enumerate(pods):
        seeded = Prompt(base.tokens, seed=b"%d" % number)
        index.apply(pod, seeded.stored(0, 40 - number), KEYS)
    for number, pod in enumerate(pods):
        found = blocks(index, pod, base.extended(9, 1))
        assert base.end(40 - number) - 20 < base.end(found) <= base.end(40 - number) - 8, "other chains prove nothing"
    index.check()


@pytest.mark.parametrize(
    ("lora", "first", "namespace"),
    [
        (None, None, None),
        (None, ["s"], join_namespace(None, "s")),
        ("sql", ["sql"], join_namespace("sql", None)),
        ("sql", ["sql", "s"], join_namespace("sql", "s")),
        ("sql", ["sql", "sql"], join_namespace("sql", "sql")),
        ("s", ["s"], join_namespace("s", None)),
        (None, ['\0{"lora": "sql", "salt": null}'], join_namespace(None, '\0{"lora": "sql", "salt": null}')),
    ],
    ids=["base", "salt", "LoRA", "both", "a salt like the LoRA", "a LoRA like the salt", "a salt that looks like us"],
)
def test_vllms_extra_keys_tell_salt_and_adapter_apart(
    lora: str | None, first: list[str] | None, namespace: str | None
) -> None:
    index, (pod,) = make_index(1)
    prompt = Prompt.random(1, 9, namespace=namespace)
    below = None if lora is None else [lora]
    extra = [first, *[below] * 3]
    index.apply(pod, prompt.stored(0, 4, cache_salt=None, lora_name=lora, lora_id=lora and 1, extra_keys=extra), KEYS)
    extra = [below] * 5
    index.apply(pod, prompt.stored(4, cache_salt=None, lora_name=lora, lora_id=lora and 1, extra_keys=extra), KEYS)
    assert blocks(index, pod, prompt) >= 7
    for other in {None, "s", join_namespace("sql", None), join_namespace("s", None)} - {namespace}:
        assert index.match("model", other, prompt.key, 0.0).hit(pod) == NO_HIT


@pytest.mark.parametrize(
    "item",
    [["image", 0], b"digest of embeddings", 7, {"a": 1}, "s"],
    ids=["image", "embeddings", "number", "map", "a string like the salt"],
)
@pytest.mark.parametrize("place", ["before the salt", "after it", "in a later block"])
def test_extra_keys_that_are_neither_salt_nor_adapter_are_not_text(item: object, place: str) -> None:
    index, (pod,) = make_index(1)
    prompt = Prompt.random(1, 4)
    first, second = ["sql", "s"], ["sql"]
    {"before the salt": first, "after it": first, "in a later block": second}[place].insert(
        1 if place == "before the salt" else 2,
        item,  # type: ignore[arg-type]
    )
    extra = [first, second, ["sql"], ["sql"]]
    index.apply(pod, prompt.stored(lora_name="sql", extra_keys=extra), KEYS)
    assert index.blocks_of(pod) == set()
    assert pod.skipped[Skip.EXTRA_KEYS] == 4


def test_blocks_of_an_unnamed_adapter_match_no_request() -> None:
    index, (pod,) = make_index(1)
    prompt = Prompt.random(1, 9)
    index.apply(pod, prompt.stored(lora_id=0), KEYS)
    assert index.blocks_of(pod) == set()
    assert pod.skipped[Skip.ADAPTER] == 9


def test_adapters_in_events_are_reported_once_and_bounded() -> None:
    index, (pod,) = make_index(1)
    for seed, name in enumerate(["sql", "sql", "code"]):
        index.apply(pod, Prompt.random(seed, 1).stored(lora_name=name), KEYS)
        assert index.new_adapters == ({pod} if seed != 1 else set())
        index.new_adapters.clear()
    for seed in range(3000):
        index.apply(pod, BlockStored([seed], None, [], 0, lora_name=f"a{seed}"), KEYS)
    assert len(pod.adapters) == 1024
    assert not pod.saw_adapter("a" * 513)
    index.remove_pod(pod)
    assert index.new_adapters == set()


def test_more_keys_than_a_block_can_have_are_not_read() -> None:
    index, (pod, _) = make_index()
    prompt = Prompt.random(1, 2)
    index.apply(pod, prompt.stored(extra_keys=[["salt"] * 5000, None]), KEYS)
    assert index.blocks_of(pod) == set()
    assert pod.skipped == {"extra_keys": 2}
