"""Edits of members in a body (model, salt): those values change, every other byte stays."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cpu import reference_s
from treeline_epp.picking.request import Request
from treeline_epp.requests.rewrite import to_send


def rewritten(body: bytes, model: str | None, members: dict[str, str | None]) -> bytes:
    found = to_send(body, None, Request("r", rewrite=model, members=members))
    assert isinstance(found, bytes)
    return found


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'{"model":"a","x":1.0}', b'{"model":"b","x":1.0}'),
        (
            b' { "x" : [ {"model":"a"} ] , "model"\n:\t"a" } ',
            b' { "x" : [ {"model":"a"} ] , "model"\n:\t"b" } ',
        ),
        (b'{"x":"model","model":"a"}', b'{"x":"model","model":"b"}'),
        (b'{"x":"\\"model\\":\\"a\\"","model":"a"}', b'{"x":"\\"model\\":\\"a\\"","model":"b"}'),
        (b'{"mod\\u0065l":"a"}', b'{"mod\\u0065l":"b"}'),
        (b'{"model":"a","model":"c"}', b'{"model":"b","model":"b"}'),
        (b'{"model":null,"model":"c"}', b'{"model":null,"model":"b"}'),
        (b'{"model":{"model":"a"}}', b'{"model":{"model":"a"}}'),
        (b'{"messages":[{"role":"user","model":"a"}]}', b'{"messages":[{"role":"user","model":"a"}]}'),
        (b"{}", b"{}"),
        (b'{"model":"a \\" }{ b"}', b'{"model":"b"}'),
    ],
)
def test_only_the_models_name_changes(before: bytes, after: bytes) -> None:
    assert rewritten(before, "b", {}) == after


def test_a_name_is_written_as_json() -> None:
    assert json.loads(rewritten(b'{"model":"a"}', 'q"\\\n€', {})) == {"model": 'q"\\\n€'}


JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=8) | st.sampled_from(["model", '"']),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=4) | st.sampled_from(["model", "x"]), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=150)
@given(
    st.dictionaries(st.text(max_size=4) | st.sampled_from(["x", "prompt"]), JSON, max_size=4),
    st.text(max_size=6),
    st.text(max_size=6),
    st.booleans(),
    st.sampled_from([None, 1]),
)
def test_decoders_see_the_same_object_with_another_model(
    rest: dict[str, Any], old: str, new: str, plain: bool, indent: int | None
) -> None:
    body = {**rest, "model": old}
    data = json.dumps(body, ensure_ascii=plain, indent=indent).encode("utf-8", "surrogatepass")
    assert json.loads(rewritten(data, new, {})) == {**body, "model": new}
    assert rewritten(rewritten(data, new, {}), old, {}) == rewritten(data, old, {})


def test_a_long_prompt_costs_a_pass_and_not_more() -> None:
    long = json.dumps({"prompt": 'say "hi" {[ \n' * 100_000, "model": "a"}).encode()
    started = time.thread_time()
    assert rewritten(long, "b", {}).endswith(b'"model": "b"}')
    assert time.thread_time() - started < 60 * reference_s()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"{}", b'{"s":"new"}'),
        (b" {\n} ", b' {\n"s":"new"} '),
        (b'{"a":1}', b'{"s":"new","a":1}'),
        (b'{"s":"old","a":1}', b'{"s":"new","a":1}'),
        (b'{"a":{"s":"old"},"s":null}', b'{"a":{"s":"old"},"s":"new"}'),
        (b'{"s":["x",{"s":"}"}],"a":1}', b'{"s":"new","a":1}'),
        (b'{"s":1.5e3 , "s":{} ,"s":true}', b'{"s":"new" , "s":"new" ,"s":"new"}'),
        (b'{"\\u0073":"old","t":"x"}', b'{"\\u0073":"new","t":null}'),
        (b'{"a":"\\"s\\":1","s":"}{"}', b'{"a":"\\"s\\":1","s":"new"}'),
    ],
)
def test_a_member_gets_the_given_value_at_any_place_and_from_any_value(before: bytes, after: bytes) -> None:
    assert rewritten(before, None, {"s": "new", "t": None}) == after


@settings(deadline=None, max_examples=150)
@given(
    st.dictionaries(st.text(max_size=4) | st.sampled_from(["s", "t", "x"]), JSON, max_size=5),
    st.text(max_size=6),
    st.booleans(),
    st.sampled_from([None, 1]),
)
def test_decoders_see_the_same_object_with_these_members(
    body: dict[str, Any], value: str, plain: bool, indent: int | None
) -> None:
    data = json.dumps(body, ensure_ascii=plain, indent=indent).encode()
    seen = json.loads(rewritten(data, None, {"s": value, "t": None}))
    assert seen == {**body, "s": value} | ({"t": None} if "t" in body else {})
    assert list(seen)[-len(body) :] == list(body) or not body


def test_a_body_that_is_no_object_is_not_edited() -> None:
    with pytest.raises(ValueError, match="no JSON object"):
        rewritten(b"[1]", None, {"s": "x"})
