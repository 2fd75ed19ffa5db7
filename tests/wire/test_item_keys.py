"""Keys of prompts with images are the keys of the token ids that a runtime makes of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.vision import PAD, WRITTEN, bundle, ids_of, tokenizer
from treeline_wire.keys import MAX_ITEM_BYTES, PrefixKeys, escape, item_key, with_item_keys
from treeline_wire.media import DIGEST_BYTES, Item, item_ids

KEYS = PrefixKeys.from_bundle(bundle())
PLACEHOLDERS = {escape(tokenizer().token_to_id(PAD)): "image"}
digests = st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES)
items = st.builds(Item, st.just("image"), digests, st.integers(1, 100))
texts = st.text(st.sampled_from("ab é\n<|世"), max_size=20)


@given(items)
def test_the_key_of_an_item_is_that_of_its_ids(item: Item) -> None:
    assert item_key(item) == KEYS.block_key(item_ids(item.digest, item.count))


@given(st.lists(st.tuples(texts, items), max_size=4), texts)
def test_the_key_of_a_text_with_items_is_that_of_the_runtimes_ids(parts: list[tuple[str, Item]], end: str) -> None:
    text = "".join(before + WRITTEN for before, _ in parts) + end
    given_items = [item for _, item in parts]
    key = with_item_keys(KEYS.prompt_key(text, False), PLACEHOLDERS, given_items)
    assert key == KEYS.block_key(ids_of(text, given_items))


@given(digests, digests, st.integers(1, 100), texts)
def test_items_of_one_size_are_never_alike(one: bytes, other: bytes, count: int, text: str) -> None:
    key = KEYS.prompt_key(WRITTEN + text, False)
    keys = {with_item_keys(key, PLACEHOLDERS, [Item("image", digest, max(count, 9))]) for digest in (one, other)}
    assert len(keys) == len({one, other})


@given(digests, st.integers(1, 100), texts)
def test_a_key_ends_with_an_item_of_an_unknown_count(digest: bytes, count: int, text: str) -> None:
    key = KEYS.prompt_key("see " + WRITTEN + text, False)
    unknown = with_item_keys(key, PLACEHOLDERS, [Item("image", digest, 0)])
    before = KEYS.prompt_key("see <|vision_start|>", False)
    assert unknown.startswith(before)
    assert unknown == with_item_keys(key + b"more", PLACEHOLDERS, [Item("image", digest, 0)])
    known = with_item_keys(key, PLACEHOLDERS, [Item("image", digest, count)])
    assert known.startswith(before)
    assert not known.startswith(unknown[: len(before) + 5])


def test_a_key_ends_before_a_placeholder_that_a_text_spells() -> None:
    key = KEYS.prompt_key(f"a{PAD}b{PAD}c", False)
    known = Item("image", bytes(DIGEST_BYTES), 3)
    assert with_item_keys(key, PLACEHOLDERS, [known]) == b"a" + item_key(known) + b"b"


def test_huge_items_end_a_key() -> None:
    key = KEYS.prompt_key(f"a{PAD}b{PAD}c", False)
    most = MAX_ITEM_BYTES // 5
    large, small = Item("image", bytes(DIGEST_BYTES), most), Item("image", bytes(DIGEST_BYTES), 1)
    assert with_item_keys(key, PLACEHOLDERS, [large, small]) == b"a" + item_key(large) + b"b"
    assert with_item_keys(key, PLACEHOLDERS, [Item("image", bytes(DIGEST_BYTES), 1 << 30), small]) == b"a"
