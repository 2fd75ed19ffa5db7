"""What operator and pods say to each other of adapters."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from treeline_wire.live_adapters import AdapterWish, is_version, version_name, wishes_of, wishes_text

TEXTS = st.text(max_size=20)
WISHES = st.lists(st.builds(AdapterWish, TEXTS, TEXTS, TEXTS), unique_by=lambda wish: wish.name)


@given(WISHES, st.randoms(use_true_random=False))
def test_wishes_come_back_and_their_order_does_not_matter(wishes, random):
    mixed = list(wishes)
    random.shuffle(mixed)
    text = wishes_text(wishes)
    assert text == wishes_text(mixed)
    assert wishes_of(text) == {wish.name: wish for wish in wishes}


@given(TEXTS, TEXTS, TEXTS.filter(lambda text: " " not in text), TEXTS)
def test_a_version_names_model_source_and_digest(model, uri, digest, other):
    name = version_name(model, uri, digest)
    assert name.rpartition("@")[0] == model
    assert is_version(name) is bool(model)
    assert (version_name(model, other, digest) == name) is (other == uri)
    assert version_name(model, uri, f"{digest}0") != name


@pytest.mark.parametrize("name", ["", "sql", "@0123456789", "sql@012345678", "sql@0123456789a", "sql@012345678G"])
def test_names_that_somebody_else_chose_are_none(name):
    assert not is_version(name)


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '[{"name": "a"}]', '[{"name": "a", "uri": 1}]', '[{"x":' + "[" * 99_999]
)
def test_what_is_no_list_of_wishes_is_refused(text):
    with pytest.raises((msgspec.MsgspecError, RecursionError)):
        wishes_of(text)
