"""Clients share a cache only by namespace: no two of (client, salt, adapter) have the same, for any strings."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from treeline_wire.namespaces import adapter_of, client_salt, event_namespace, join_namespace, join_salt, with_adapter
from treeline_wire.prompt import PromptError, namespace_of

# Strings that could confuse a joiner: separators, marks, what JSON writes, and the derived strings themselves.
_PIECES = st.sampled_from('ab é\0"\\,:{}[]') | st.sampled_from(["null", "client", "lora", "salt"])
TEXTS = st.lists(_PIECES, max_size=6).map("".join)


@st.composite
def derived(draw: st.DrawFn) -> str:
    """Draw the namespace of another client's request: the best salt that an attacker can think of."""
    return join_namespace(draw(TEXTS), draw(TEXTS), draw(TEXTS)) or ""


STRINGS = st.none() | TEXTS | st.text() | derived()


def canonical(*parts: str | None) -> tuple[str | None, ...]:
    return tuple(part or None for part in parts)


@given(first=st.tuples(STRINGS, STRINGS, STRINGS), second=st.tuples(STRINGS, STRINGS, STRINGS))
@example(first=(None, join_namespace(None, None, "ada"), None), second=(None, None, "ada"))
@example(first=("l", None, "ada"), second=(None, "l", "ada"))
def test_distinct_triples_of_adapter_salt_and_client_never_share_a_namespace(first, second):
    same = canonical(*first) == canonical(*second)
    assert (join_namespace(*first) == join_namespace(*second)) == same


@given(lora=STRINGS, other=STRINGS, salt=STRINGS, client=STRINGS)
def test_another_adapter_takes_the_place_of_the_first_and_of_nothing_else(lora, other, salt, client):
    expected = join_namespace(other if lora and other else lora, salt, client)
    assert with_adapter(join_namespace(lora, salt, client), other or None) == expected


@given(lora=STRINGS, salt=STRINGS, client=STRINGS)
def test_the_adapter_is_read_from_the_namespace_with_any_salt(lora, salt, client):
    namespace = join_namespace(lora, salt, client)
    assert adapter_of(namespace) == (lora or None)
    assert event_namespace(adapter_of(namespace), namespace) == namespace, "as our runtime publishes it"


@given(first=st.tuples(STRINGS, STRINGS), second=st.tuples(STRINGS, STRINGS))
@example(first=('["a", "b"]', None), second=("a", "b"))
@example(first=('\0["a", "b"]', None), second=("a", "b"))
def test_distinct_pairs_of_salt_and_extra_key_never_make_one_salt(first, second):
    same = canonical(*first) == canonical(*second)
    assert (join_salt(*first) == join_salt(*second)) == same


@given(salt=STRINGS, lora=STRINGS)
def test_no_salt_of_one_client_reaches_the_namespace_of_another_or_the_common_one(salt, lora):
    others = {join_namespace(lora, None, "bob"), join_namespace(None, None, "bob"), None}
    body = {"lora_path": lora, "cache_salt": salt}
    try:
        mine = namespace_of(body, "ada")
    except PromptError:
        return  # half of a surrogate pair: refused
    assert mine not in others
    assert event_namespace(None, mine) == mine, "as our runtime publishes it"


@given(
    first=st.tuples(TEXTS.filter(bool), STRINGS),
    second=st.tuples(TEXTS.filter(bool), STRINGS),
    key=st.binary(max_size=40),
)
def test_derived_salts_differ_for_different_clients_and_salts_and_stay_the_same_for_the_same(first, second, key):
    same = (first[0], first[1] or None) == (second[0], second[1] or None)
    assert (client_salt(key, *first) == client_salt(key, *second)) == same
    assert re.fullmatch("[0-9a-f]{64}", client_salt(key, *first))


def test_a_derived_salt_depends_on_the_secret_key():
    assert client_salt(b"one", "ada", None) != client_salt(b"two", "ada", None)


@pytest.mark.parametrize("name", ["lora_path", "cache_salt", "extra_key"])
def test_half_of_a_surrogate_pair_in_a_salt_is_refused_with_the_name_of_the_field(name):
    with pytest.raises(PromptError) as refusal:
        namespace_of({name: "\ud800"}, "ada")
    assert refusal.value.param == name
