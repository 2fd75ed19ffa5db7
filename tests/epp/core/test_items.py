"""Images in KV events: counts are learnt, vLLM's items are spelled as ours, and a wrong count only misroutes."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.vision import PAD, WRITTEN, bundle, content, ids_of, item, picture, tokenizer
from treeline_epp.index import items as module
from treeline_epp.index.index import Index
from treeline_epp.index.items import EXPECTED_S, MAX_ITEM_BYTES, MAX_TOKENS, Items, Placed
from treeline_epp.index.pods import Pod
from treeline_epp.kvevents.item_events import MAX_HELD, ItemEvents
from treeline_wire.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    block_hash,
    decode_batch,
    encode_batch,
    hash_of,
    root_digest,
)
from treeline_wire.keys import PrefixKeys, item_key
from treeline_wire.media import FIRST_ID, Item, item_ids
from treeline_wire.namespaces import join_namespace

WIDTH = 16
KEYS = PrefixKeys.from_bundle(bundle())
PAD_ID = tokenizer().token_to_id(PAD)


def new_items() -> Items:
    spec = bundle().media
    assert spec is not None
    return Items(KEYS, spec)


def stored(ids: Sequence[int], start: int = 0, stop: int | None = None, salt: str | None = None) -> BlockStored:
    """Return our runtime's event for whole blocks of a prompt's ids, from block `start` on."""
    hashes, digest = [], root_digest(salt)
    for at in range(0, len(ids) - WIDTH + 1, WIDTH):
        digest = block_hash(digest, ids[at : at + WIDTH])
        hashes.append(hash_of(digest))
    shown = hashes[start:stop]
    parent = hashes[start - 1] if start else None
    tokens = list(ids[start * WIDTH : (start + len(shown)) * WIDTH])
    return BlockStored(shown, parent, tokens, WIDTH, cache_salt=salt)


def name_of(one: Item) -> str:
    """Return vLLM's name of an item: a hash of its own."""
    return hashlib.sha256(one.digest).hexdigest()


def as_vllm(ids: Sequence[int], event: BlockStored, start: int, placed: list[tuple[int, Item]]) -> BlockStored:
    """Return an event as vLLM 0.33 sends it: placeholders, and each block's items with their offsets from it
    (`_gen_mm_extra_hash_keys` in vllm/v1/core/kv_cache_utils.py), by way of the wire."""
    extra: list[list[object] | None] = []
    for at in range(start, start + len(event.block_hashes)):
        begin, end = at * WIDTH, (at + 1) * WIDTH
        there = [[name_of(one), place - begin] for place, one in placed if place < end and place + one.count > begin]
        extra.append([*there] or None)
    tokens = [PAD_ID if token >= FIRST_ID else token for token in event.token_ids]
    sent = BlockStored(event.block_hashes, event.parent_block_hash, tokens, WIDTH, medium="GPU", extra_keys=extra)
    (read,) = decode_batch(encode_batch(1.0, [sent])).events
    assert isinstance(read, BlockStored)
    return read


def test_where_all_items_have_as_many_tokens_the_first_key_is_whole_and_the_name_is_expected() -> None:
    spec = bundle().media
    assert spec is not None
    items, one = Items(KEYS, replace(spec, counts={"image": 40})), item(picture(1), 40)
    placed = items.placed(KEYS.prompt_key(f"a {WRITTEN} b", False), [content(picture(1))])
    assert placed.key == KEYS.block_key(ids_of(f"a {WRITTEN} b", [one]))
    assert (placed.complete, placed.tokens) == (True, 40)
    assert [expected.digest for expected in placed.expected] == [one.digest]


def places_of(ids: Sequence[int], given_items: Sequence[Item]) -> list[tuple[int, Item]]:
    places, at = [], 0
    for one in given_items:
        at = next(i for i in range(at, len(ids)) if ids[i] >= FIRST_ID)
        places.append((at, one))
        at += one.count
    return places


def held(index: Index, pod: Pod, key: bytes, namespace: str | None = None) -> int:
    """Return the tokens of the key that a pod holds."""
    return index.match("model", namespace, key, 0.0).hit(pod).tokens


def placed(text: str, items: Items, *seeds: int) -> Placed:
    """Return a request's key, with the counts that are known."""
    return items.placed(KEYS.prompt_key(text, False), [content(picture(seed)) for seed in seeds])


prompts = st.lists(
    st.tuples(st.text("ab ", max_size=30), st.integers(0, 3), st.integers(48, 120)), min_size=1, max_size=3
)
"""Texts and images; of two whole blocks, one names the image."""


@given(prompts, st.text("ab ", min_size=40, max_size=80), st.lists(st.integers(1, 6), max_size=12), st.booleans())
def test_a_request_matches_what_events_store_once_counts_are_known(
    parts: list[tuple[str, int, int]], end: str, cuts: list[int], foreign: bool
) -> None:
    """In events cut anywhere, of our runtime and of vLLM."""
    sizes = {seed: count for _, seed, count in parts}
    given_items = [item(picture(seed), sizes[seed]) for _, seed, _ in parts]
    text = "".join(before + WRITTEN for before, _, _ in parts) + end
    ids = ids_of(text, given_items)
    items, index = new_items(), Index()
    pod = index.add_pod("pod", "model")
    events = ItemEvents(items, "pod")
    seeds = [seed for _, seed, _ in parts]
    items.expect(placed(text, items, *seeds).expected, "pod", 0.0)
    places = places_of(ids, given_items)
    blocks, start = len(ids) // WIDTH, 0
    for size in [*cuts, blocks]:
        if start < blocks:
            event = stored(ids, start, start + size)
            read = events.read(as_vllm(ids, event, start, places) if foreign else event)
            if read is not None:
                index.apply(pod, read, KEYS)
        start += size
    key, _, complete, expected = placed(text, items, *seeds)
    if complete:
        assert key == KEYS.block_key(ids)
    else:  # a cut took away what tells two images apart
        assert foreign
        assert len({one.digest for one in expected}) > 1
        return
    assert held(index, pod, key) >= (blocks - 1) * WIDTH, "the last block may be unproved"
    assert held(index, pod, key) <= blocks * WIDTH
    index.check()


def test_two_images_of_one_size_never_match() -> None:
    items, index = new_items(), Index()
    pod = index.add_pod("pod", "model")
    one, other = item(picture(1), 64), item(picture(2), 64)
    text = f"look at {WRITTEN} and tell me what you see in it, at some length"
    events = ItemEvents(items, "pod")
    for event in (stored(ids_of(text, [one])), stored(ids_of(WRITTEN, [other]))):
        read = events.read(event)
        assert read is not None
        index.apply(pod, read, KEYS)
    assert held(index, pod, placed(text, items, 1).key) > 64
    assert held(index, pod, placed(text, items, 2).key) < 16


def test_images_are_kept_apart_by_namespaces() -> None:
    items, index = new_items(), Index()
    pod = index.add_pod("pod", "model")
    one, text = item(picture(1), 64), f"{WRITTEN} what is this? " * 3
    read = ItemEvents(items, "pod").read(stored(ids_of(text, [one] * 3), salt="tenant"))
    assert isinstance(read, BlockStored)
    index.apply(pod, read, KEYS)
    key = placed(text, items, 1, 1, 1).key
    assert held(index, pod, key, read.namespace) > 128
    assert held(index, pod, key) == held(index, pod, key, "other") == 0


def test_a_prefix_may_end_inside_an_image() -> None:
    items, index = new_items(), Index()
    pod = index.add_pod("pod", "model")
    one, text = item(picture(1), 100), f"{WRITTEN} what is this?"
    read = ItemEvents(items, "pod").read(stored(ids_of(text, [one]), 0, 3))
    assert read is not None
    index.apply(pod, read, KEYS)
    assert items.count(one.digest) == 100, "any seventeen of its tokens tell"
    assert held(index, pod, placed(text, items, 1).key) == 2 * WIDTH, "the last block is not proved"


def test_a_second_request_follows_the_first_before_events_name_its_image() -> None:
    items, index = new_items(), Index()
    first, second = index.add_pod("first", "model"), index.add_pod("second", "model")
    text = f"a rather long instruction about pictures {WRITTEN} and a question"
    key = placed(text, items, 1).key
    index.predict(first, None, key, index.match("model", None, key, 0.0).hit(first), 0.0)
    found = index.match("model", None, placed(text + " another", items, 1).key, 1.0)
    other = index.match("model", None, placed(text, items, 2).key, 1.0)
    assert found.hit(first).reach > other.hit(first).reach > 0
    assert found.hit(first).reach <= len(key)
    assert found.hit(first).tokens == found.hit(second).reach == 0


def test_a_key_ends_before_a_placeholder_without_an_item_and_one_that_is_too_large() -> None:
    items, text = new_items(), f"a{PAD}b{PAD}c"
    one = item(picture(1), 3)
    items.learn(one.digest, 3)
    assert placed(text, items, 1) == (b"a" + item_key(one.digest, 3) + b"b", 3, False, [])
    large = list(range(2, 22))
    for number in large:
        items.learn(item(picture(number), 1).digest, MAX_TOKENS)
    found = placed(f"a{PAD}" * 20, items, *large)
    assert len(found.key) <= MAX_ITEM_BYTES + 20
    assert not found.complete
    assert found.tokens == 20 * MAX_TOKENS
    items.learn(one.digest, 1 << 29)
    assert items.count(one.digest) == 3, "no processor makes so many"


def begun(seed: int, text: str = f"{WRITTEN} what is this?") -> tuple[BlockStored, BlockStored]:
    """Return vLLM's events of two chunks, of which the first ends inside the image."""
    ids = ids_of(text, [item(picture(seed), 100)])
    places = places_of(ids, [item(picture(seed), 100)])
    return as_vllm(ids, stored(ids, 0, 3), 0, places), as_vllm(ids, stored(ids, 3), 3, places)


def test_vllms_name_of_an_image_is_learnt_by_the_texts_beside_it() -> None:
    items, text = new_items(), f"{WRITTEN} what is this?"
    for seed, endpoint, now in ((3, "pod", -2 * EXPECTED_S), (1, "pod", 0.0), (2, "other", 0.0)):
        items.expect(placed(text, items, seed).expected, endpoint, now)
    items.expect(placed(f"{WRITTEN} why?", items, 4).expected, "pod", 0.0)
    items.expect((), "pod", 0.0)
    first, rest = begun(1)
    events = ItemEvents(items, "pod")
    assert events.read(first) is None
    read = events.read(rest)
    assert isinstance(read, BlockStored)
    assert items.named(name_of(item(picture(1), 100))) == item(picture(1), 100).digest
    assert placed(text, items, 1).key.startswith(KEYS.block_key(read.token_ids))
    assert placed(text, items, 1).expected == []


def test_images_that_nothing_tells_apart_stay_unknown() -> None:
    items, text = new_items(), f"{WRITTEN} what is this, and what is behind it?"
    for seed in (1, 2):
        items.expect(placed(text, items, seed).expected, "pod", 0.0)
    events = ItemEvents(items, "pod")
    first, rest = begun(1, text)
    assert events.read(first) is None
    read = events.read(rest)
    assert isinstance(read, BlockStored)
    assert read.token_ids == [*first.token_ids, *rest.token_ids], "the index skips it"
    items.expect((), "pod", 2 * EXPECTED_S)
    items.expect(placed(text, items, 1).expected, "pod", 2 * EXPECTED_S)
    events.read(first)
    assert events.read(rest) != read, "the other is forgotten"


@pytest.mark.parametrize("bare", [False, True])
def test_a_salt_beside_an_image_is_kept(bare: bool) -> None:
    items, text = new_items(), f"some words before the image, more than a block has of them {WRITTEN} what is this?"
    given_items = [item(picture(1), 40)]
    ids = ids_of(text, given_items)
    event = as_vllm(ids, stored(ids), 0, places_of(ids, given_items))
    salt: list[object] = ["salt" if bare else ["salt"]]
    items.expect(placed(text, items, 1).expected, "pod", 0.0)
    read = ItemEvents(items, "pod").read(replace(event, extra_keys=[*salt, *(event.extra_keys or ())[1:]]))
    assert isinstance(read, BlockStored)
    index = Index()
    pod = index.add_pod("pod", "model")
    index.apply(pod, read, KEYS)
    key = placed(text, items, 1).key
    assert held(index, pod, key, join_namespace(None, "salt")) >= WIDTH * 3
    assert held(index, pod, key) == 0


def test_images_in_a_row_are_recognized_by_their_order() -> None:
    items, text = new_items(), f"compare {WRITTEN * 4} at length, and say which one is the best of them all"
    items.expect(placed(text, items, 1, 2, 3, 4).expected, "pod", 0.0)
    given_items = [item(picture(seed), 20) for seed in (1, 2, 3, 4)]
    ids = ids_of(text, given_items)
    read = ItemEvents(items, "pod").read(as_vllm(ids, stored(ids), 0, places_of(ids, given_items)))
    assert isinstance(read, BlockStored)
    assert read.token_ids == list(ids[: len(read.token_ids)])


def test_sglangs_images_end_the_match_of_a_text() -> None:
    """Its events have numbers of 62 bits for an image's tokens, which no other program can compute
    (`_compute_pad_values` in sglang/srt/managers/schedule_batch.py)."""
    items, index = new_items(), Index()
    pod = index.add_pod("pod", "model")
    before = "please look at the following picture for as long as you need to understand it well "
    text = f"{before}{WRITTEN} what is this?"
    ids = ids_of(text, [item(picture(1), 64)])
    pads = [1_000_000 + (random.Random(seed).getrandbits(62)) for seed in range(4)]
    event = stored(ids)
    tokens = [pads[at % 4] if token >= FIRST_ID else token for at, token in enumerate(event.token_ids)]
    (read,) = decode_batch(encode_batch(1.0, [replace(event, token_ids=tokens)])).events
    applied = ItemEvents(items, "pod").read(read)
    assert applied is read
    index.apply(pod, applied, KEYS)
    size = len(tokenizer().encode(before).ids)
    for seed in (1, 2):
        assert size - 2 * WIDTH < held(index, pod, placed(text, items, seed).key) <= size
    assert items.count(item(picture(1), 64).digest) is None


def test_an_event_that_waits_is_forgotten_with_its_blocks() -> None:
    for gone in (BlockRemoved([begun(1)[0].block_hashes[-1]]), AllBlocksCleared(), None):
        events = ItemEvents(new_items(), "pod")
        first, rest = begun(1)
        assert events.read(first) is None
        if gone is not None:
            assert events.read(gone) is gone
        read = events.read(rest)
        assert isinstance(read, BlockStored)
        assert read.block_hashes == [*(first.block_hashes if gone is None else ()), *rest.block_hashes]


def test_at_most_a_few_events_wait() -> None:
    events = ItemEvents(new_items(), "pod")
    chunks = [begun(seed, f"{seed} {WRITTEN} what is this?") for seed in range(MAX_HELD + 1)]
    for first, _ in chunks:
        assert events.read(first) is None
    read = [events.read(rest) for _, rest in chunks]
    assert [len(one.block_hashes) for one in read if isinstance(one, BlockStored)] == [4, *[7] * MAX_HELD]


@given(
    st.lists(st.sampled_from([5, PAD_ID, FIRST_ID, 0xFFFF_FFFF]), max_size=64),
    st.lists(
        st.none()
        | st.lists(
            st.tuples(st.sampled_from(["x", "known"]), st.sampled_from([0, 3, -40, 1 << 40, -(1 << 40)]) | st.none())
        ),
        max_size=5,
    ),
)
def test_hostile_events_are_read(tokens: list[int], extra: list[list[object] | None]) -> None:
    items = new_items()
    items.expect(placed(WRITTEN, items, 1).expected, "pod", 0.0)
    items.recognize("pod", "known", b"", b"")
    items.learn(item(picture(1), 4).digest, 4)
    event = BlockStored(list(range(len(tokens) // WIDTH)), None, tokens, WIDTH, extra_keys=extra)
    read = ItemEvents(items, "pod").read(event)
    assert read is None or (isinstance(read, BlockStored) and len(read.token_ids) == len(tokens))


def test_counts_are_bounded_and_wrong_ones_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KNOWN", 4)
    items = new_items()
    rng = random.Random(1)
    one = item(picture(1), 64)
    events = ItemEvents(items, "pod")
    for count in (1000, 64):  # of a broken engine, then of another one
        events.read(BlockStored([1, 2], None, item_ids(one.digest, count)[:32], WIDTH))
        assert items.count(one.digest) == count
    for _ in range(10):
        items.learn(rng.randbytes(30), 1)
        assert items.count(one.digest) == 64, "in use"
    for _ in range(4):
        items.learn(rng.randbytes(30), 1)
    assert items.count(one.digest) is None
