"""Images in KV events: counts are learnt, vLLM's items are spelled as ours, and a wrong count only misroutes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.vision import PAD, WRITTEN, bundle, ids_of, item, picture, tokenizer
from treeline_epp.index.index import Index
from treeline_epp.index.pods import Pod
from treeline_epp.keyers import items as module
from treeline_epp.keyers.items import MAX_TOKENS, ItemEvents, Items
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
from treeline_wire.keys import PrefixKeys
from treeline_wire.media import FIRST_ID, Item, item_ids

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


def as_vllm(ids: Sequence[int], event: BlockStored, start: int, placed: list[tuple[int, Item]]) -> BlockStored:
    """Return an event as vLLM 0.33 sends it: placeholders, and each block's items with their offsets from it
    (`_gen_mm_extra_hash_keys` in vllm/v1/core/kv_cache_utils.py), by way of the wire."""
    extra: list[list[object] | None] = []
    for at in range(start, start + len(event.block_hashes)):
        begin, end = at * WIDTH, (at + 1) * WIDTH
        there = [
            [one.digest.hex(), place - begin] for place, one in placed if place < end and place + one.count > begin
        ]
        extra.append([*there] or None)
    tokens = [PAD_ID if token >= FIRST_ID else token for token in event.token_ids]
    sent = BlockStored(event.block_hashes, event.parent_block_hash, tokens, WIDTH, medium="GPU", extra_keys=extra)
    (read,) = decode_batch(encode_batch(1.0, [sent])).events
    assert isinstance(read, BlockStored)
    return read


def held(index: Index, pod: Pod, key: bytes, namespace: str | None = None) -> int:
    """Return the tokens of the key that a pod holds."""
    return index.match("model", namespace, key, 0.0).hit(pod).tokens


def key_of(text: str, items: Items, given_items: Sequence[Item]) -> bytes:
    """Return a request's key, with the counts that are known."""
    known = [Item(one.kind, one.digest, items.count(one.digest) or 0) for one in given_items]
    return items.with_items(KEYS.prompt_key(text, False), known)


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
    places, at = [], 0
    for one in given_items:
        at = next(i for i in range(at, len(ids)) if ids[i] >= FIRST_ID)
        places.append((at, one))
        at += one.count
    items, index = new_items(), Index()
    pod = index.add_pod("pod", "model")
    events = ItemEvents(items)
    blocks, start = len(ids) // WIDTH, 0
    for size in [*cuts, blocks]:
        if start < blocks:
            event = stored(ids, start, start + size)
            read = events.read(as_vllm(ids, event, start, places) if foreign else event)
            if read is not None:
                index.apply(pod, read, KEYS)
        start += size
    key = key_of(text, items, given_items)
    assert key == KEYS.block_key(ids)
    assert held(index, pod, key) >= (blocks - 1) * WIDTH, "the last block may be unproved"
    assert held(index, pod, key) <= blocks * WIDTH
    index.check()


def test_two_images_of_one_size_never_match() -> None:
    items, index = new_items(), Index()
    pod = index.add_pod("pod", "model")
    one, other = item(picture(1), 64), item(picture(2), 64)
    text = f"look at {WRITTEN} and tell me what you see in it, at some length"
    events = ItemEvents(items)
    for event in (stored(ids_of(text, [one])), stored(ids_of(WRITTEN, [other]))):
        read = events.read(event)
        assert read is not None
        index.apply(pod, read, KEYS)
    assert held(index, pod, key_of(text, items, [one])) > 64
    assert held(index, pod, key_of(text, items, [other])) < 16


def test_images_are_kept_apart_by_namespaces() -> None:
    items, index = new_items(), Index()
    pod = index.add_pod("pod", "model")
    one, text = item(picture(1), 64), f"{WRITTEN} what is this? " * 3
    three = [one] * 3
    read = ItemEvents(items).read(stored(ids_of(text, three), salt="tenant"))
    assert read is not None
    index.apply(pod, read, KEYS)
    key = key_of(text, items, three)
    salted = read.namespace if isinstance(read, BlockStored) else None
    assert held(index, pod, key, salted) > 128
    assert held(index, pod, key) == held(index, pod, key, "other") == 0


def test_a_prefix_may_end_inside_an_image() -> None:
    items, index = new_items(), Index()
    pod = index.add_pod("pod", "model")
    one, text = item(picture(1), 100), f"{WRITTEN} what is this?"
    read = ItemEvents(items).read(stored(ids_of(text, [one]), 0, 3))
    assert read is not None
    index.apply(pod, read, KEYS)
    assert items.count(one.digest) == 100, "any seventeen of its tokens tell"
    assert held(index, pod, key_of(text, items, [one])) == 2 * WIDTH, "the last block is not proved"


def test_a_second_request_follows_the_first_before_events_name_its_image() -> None:
    items, index = new_items(), Index()
    first, second = index.add_pod("first", "model"), index.add_pod("second", "model")
    text = f"a rather long instruction about pictures {WRITTEN} and a question"
    key = key_of(text, items, [item(picture(1), 64)])
    index.predict(first, None, key, index.match("model", None, key, 0.0).hit(first), 0.0)
    found = index.match("model", None, key_of(text + " another", items, [item(picture(1), 64)]), 1.0)
    other = index.match("model", None, key_of(text, items, [item(picture(2), 64)]), 1.0)
    assert found.hit(first).reach > other.hit(first).reach > 0
    assert found.hit(first).reach <= len(key)
    assert found.hit(first).tokens == found.hit(second).reach == 0


def test_an_event_that_waits_is_forgotten_with_its_blocks() -> None:
    one, text = item(picture(1), 100), f"{WRITTEN} what is this? {WRITTEN}"
    ids = ids_of(text, [one, one])
    at = next(i for i, token in enumerate(ids) if token >= FIRST_ID)
    begun = as_vllm(ids, stored(ids, 0, 3), 0, [(at, one)])
    rest = as_vllm(ids, stored(ids, 3, 7), 3, [(at, one)])
    for gone in (BlockRemoved([begun.block_hashes[-1]]), AllBlocksCleared(), None):
        events = ItemEvents(new_items())
        assert events.read(begun) is None
        if gone is not None:
            assert events.read(gone) is gone
        read = events.read(rest)
        assert isinstance(read, BlockStored)
        assert len(read.block_hashes) == (4 if gone is not None else 7)
        assert [token for token in read.token_ids if token == PAD_ID] == []


def test_at_most_a_few_events_wait() -> None:
    events = ItemEvents(new_items())
    begun = []
    for seed in range(module.MAX_HELD + 1):
        ids = ids_of(f"{seed} {WRITTEN}", [item(picture(seed), 100)])
        at = next(i for i, token in enumerate(ids) if token >= FIRST_ID)
        begun.append((ids, [(at, item(picture(seed), 100))]))
        assert events.read(as_vllm(ids, stored(ids, 0, 2), 0, begun[-1][1])) is None
    blocks = []
    for ids, placed in begun:
        read = events.read(as_vllm(ids, stored(ids, 2), 2, placed))
        if read is not None:
            blocks.append(len(read.block_hashes) if isinstance(read, BlockStored) else 0)
    assert blocks == []  # each prompt ends inside its image: all wait again


def test_vllms_own_identifiers_stay_unknown() -> None:
    """A blake3 of an image that the picker did not name."""
    ids = ids_of(f"{WRITTEN} what?" * 2, [item(picture(1), 40)] * 2)
    event = stored(ids)
    extra = [[["a" * 64, 1 - 16 * at]] for at in range(len(event.block_hashes))]
    sent = BlockStored(event.block_hashes, None, [5] * len(event.token_ids), WIDTH, extra_keys=extra)
    assert ItemEvents(new_items()).read(sent) is sent


@given(
    st.lists(st.sampled_from([5, PAD_ID, FIRST_ID, 0xFFFF_FFFF]), max_size=64),
    st.lists(
        st.none()
        | st.lists(
            st.tuples(
                st.sampled_from(["ab" * 30, "x", "ab" * 31]),
                st.sampled_from([0, 3, -40, 1 << 40, -(1 << 40)]) | st.none(),
            )
        ),
        max_size=5,
    ),
)
def test_hostile_events_are_read(tokens: list[int], extra: list[list[object] | None]) -> None:
    items = new_items()
    event = BlockStored(list(range(len(tokens) // WIDTH)), None, tokens, WIDTH, extra_keys=extra)
    read = ItemEvents(items).read(event)
    assert read is None or len(read.token_ids) == len(tokens)  # type: ignore[union-attr]


def test_counts_are_bounded_and_wrong_ones_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_COUNTS", 4)
    items = new_items()
    rng = random.Random(1)
    for number in range(10):
        items.learn(rng.randbytes(30), number + 1)
    one = item(picture(1), 64)
    items.learn(one.digest, MAX_TOKENS + 1)
    assert items.count(one.digest) is None, "no processor makes so many"
    events = ItemEvents(items)
    for count in (1000, 64):  # a broken engine, then another one
        events.read(BlockStored([1, 2], None, item_ids(one.digest, count)[:32], WIDTH))
        assert items.count(one.digest) == count
    for _ in range(3):
        items.learn(rng.randbytes(30), 1)
        assert items.count(one.digest) == 64, "in use"
    for _ in range(4):
        items.learn(rng.randbytes(30), 1)
    assert items.count(one.digest) is None
