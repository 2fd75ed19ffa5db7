"""Ids of images in prompts: they spell the item, whatever part of it is seen."""

from __future__ import annotations

import base64
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from treeline_wire.errors import PromptError
from treeline_wire.media import (
    DIGEST_BYTES,
    FIRST_ID,
    MAX_COUNT,
    Item,
    counts_in,
    digest_of,
    item_digest,
    item_ids,
    with_items,
)

digests = st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES)
text = st.lists(st.integers(0, FIRST_ID - 1), max_size=20)


@given(digests, st.integers(17, 300), st.data())
def test_any_seventeen_ids_name_the_item(digest: bytes, count: int, data: st.DataObject) -> None:
    ids = item_ids(digest, count)
    assert len(ids) == count
    at = data.draw(st.integers(0, count - 17))
    assert counts_in(ids[at : at + 17]) == {digest: count}


@given(st.lists(st.tuples(text, digests, st.integers(1, 60)), max_size=4), text)
def test_items_in_a_prompt_are_found(parts: list[tuple[list[int], bytes, int]], end: list[int]) -> None:
    ids = [id for before, digest, count in parts for id in (*before, *item_ids(digest, count))] + end
    long = {digest: count for _, digest, count in parts if count >= 17}
    found = counts_in(ids)
    assert long.items() <= found.items() or len({d for _, d, _ in parts}) < len(parts)


@given(st.lists(st.integers(0, 0xFFFF_FFFF), max_size=60))
def test_counts_in_reads_any_ids(ids: list[int]) -> None:
    for digest, count in counts_in(ids).items():
        assert len(digest) == DIGEST_BYTES
        assert 0 <= count <= MAX_COUNT


@given(digests, digests, st.integers(9, 40))
def test_two_items_of_one_size_share_no_whole_cycle(one: bytes, other: bytes, count: int) -> None:
    assert (item_ids(one, count) == item_ids(other, count)) == (one == other)


def test_a_digest_is_of_kind_processor_and_bytes() -> None:
    made = {
        item_digest(*args)
        for args in [("image", b"x", "p"), ("video", b"x", "p"), ("image", b"x", "q"), ("image", b"y", "p")]
    }
    assert len(made) == 4
    assert item_digest("image", b"x", "1:p") != item_digest("image", b"px", "1:")


@given(st.binary(max_size=200))
def test_a_digest_is_known_from_the_base64_of_a_request(data: bytes) -> None:
    content = hashlib.sha256(base64.b64encode(data)).digest()
    assert digest_of("image", content, "p") == item_digest("image", data, "p")


IMAGE, VIDEO = 7, 8
items = st.builds(Item, st.sampled_from(["image", "video"]), digests, st.integers(1, 30))


@given(st.lists(st.tuples(st.lists(st.integers(10, 99), max_size=5), items), max_size=5), st.data())
def test_placeholders_become_the_items_of_their_kind_in_order(
    parts: list[tuple[list[int], Item]], data: st.DataObject
) -> None:
    ids, expected, starts = [], [], []
    for text, item in parts:
        ids += [*text, IMAGE if item.kind == "image" else VIDEO]
        starts.append(len(expected) + len(text))
        expected += [*text, *item_ids(item.digest, item.count)]
    given_items = [item for _, item in parts]
    assert with_items(ids, {IMAGE: "image", VIDEO: "video"}, given_items) == (expected, starts)
    at = data.draw(st.integers(0, len(ids)))
    with pytest.raises(PromptError):
        with_items([*ids[:at], IMAGE, *ids[at:]], {IMAGE: "image", VIDEO: "video"}, given_items)


def test_an_item_without_a_placeholder_is_refused() -> None:
    image, sound = Item("image", bytes(30), 4), Item("audio", bytes(30), 4)
    for ids, given_items in (([1, 2], [image]), ([IMAGE], [image, image]), ([IMAGE], [image, sound])):
        with pytest.raises(PromptError):
            with_items(ids, {IMAGE: "image"}, given_items)


@given(digests, digests, st.integers(1, 40))
def test_the_first_token_tells_items_of_one_size_apart(one: bytes, other: bytes, count: int) -> None:
    if one[:3] != other[:3]:
        assert item_ids(one, count)[0] != item_ids(other, count)[0]
