"""Another model name in a body: one string changes, every other byte stays."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treeline_epp.rewrite import with_model


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
    assert with_model(before, "b") == after


def test_a_name_is_written_as_json() -> None:
    assert json.loads(with_model(b'{"model":"a"}', 'q"\\\n€')) == {"model": 'q"\\\n€'}


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from(["model", '"']),
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
    assert json.loads(with_model(data, new)) == {**body, "model": new}
    assert with_model(with_model(data, new), old) == with_model(data, old)


def test_a_long_prompt_costs_a_pass_and_not_more() -> None:
    long = json.dumps({"prompt": 'say "hi" {[ \n' * 100_000, "model": "a"}).encode()
    started = time.perf_counter()
    assert with_model(long, "b").endswith(b'"model": "b"}')
    assert time.perf_counter() - started < 0.5
