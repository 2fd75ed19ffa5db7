"""Keys of prompts with images are the keys of the token ids that a runtime makes of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.vision import PAD, WRITTEN, bundle, ids_of, tokenizer
from treeline_wire.keys import PrefixKeys, escape, item_key, split_at
from treeline_wire.media import DIGEST_BYTES, Item, item_ids

KEYS = PrefixKeys.from_bundle(bundle())
PLACEHOLDERS = {escape(tokenizer().token_to_id(PAD)): "image"}
digests = st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES)
items = st.builds(Item, st.just("image"), digests, st.integers(1, 100))
texts = st.text(st.sampled_from("ab é\n<|世"), max_size=20)


@given(digests, st.integers(1, 100))
def test_the_key_of_an_item_is_that_of_its_ids(digest: bytes, count: int) -> None:
    assert item_key(digest, count) == KEYS.block_key(item_ids(digest, count))
    unknown = item_key(digest, 0)
    assert not item_key(digest, count).startswith(unknown[:5])
    assert not unknown.startswith(item_key(digest, count))


@given(digests, digests, st.integers(9, 100))
def test_items_of_one_size_are_never_alike(one: bytes, other: bytes, count: int) -> None:
    for size in (count, 0):
        assert (item_key(one, size) == item_key(other, size)) == (one == other)


@given(st.lists(st.tuples(texts, items), max_size=4), texts)
def test_the_key_of_a_text_with_items_is_that_of_the_runtimes_ids(parts: list[tuple[str, Item]], end: str) -> None:
    text = "".join(before + WRITTEN for before, _ in parts) + end
    between, kinds = split_at(KEYS.prompt_key(text, False), PLACEHOLDERS)
    assert kinds == ["image"] * len(parts)
    key = between[0] + b"".join(
        item_key(item.digest, item.count) + after for (_, item), after in zip(parts, between[1:], strict=True)
    )
    assert key == KEYS.block_key(ids_of(text, [item for _, item in parts]))
