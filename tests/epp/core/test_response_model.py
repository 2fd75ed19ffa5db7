"""Names in responses: as if each object were parsed, in whatever pieces it comes, and nothing else is touched."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from treeline_epp.requests.response_model import ModelRenamer

SHOWN, ASKED = "base/llama-8b", 'the "fast" one'
names = st.sampled_from([SHOWN, ASKED, "model", "", 'x "model": "base/llama-8b"', "\\", 'é"\\'])
values = st.recursive(
    st.none() | st.integers() | names,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["model", "message", "response", "text", 'mo"del']), inner, max_size=4)
    ),
    max_leaves=12,
)


def renamed(value: Any) -> Any:
    """What is to be, of a parsed object."""
    if not isinstance(value, dict):
        return value
    out = {key: ASKED if key == "model" and one == SHOWN else one for key, one in value.items()}
    for key in ("message", "response"):
        if isinstance(inner := out.get(key), dict):
            out[key] = {name: ASKED if name == "model" and one == SHOWN else one for name, one in inner.items()}
    return out


def fed(body: bytes, cuts: list[int]) -> bytes:
    renamer, edges = ModelRenamer(SHOWN, ASKED), [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    pieces = [body[a:b] for a, b in pairwise(edges)]
    out = [renamer.feed(piece) for piece in pieces]
    return b"".join([*out, renamer.feed(b"", end=True)])


@given(st.lists(values, min_size=1, max_size=4), st.lists(st.integers(0, 4000), max_size=9), st.booleans())
def test_names_are_put_back_in_each_object_of_a_stream(objects: list[Any], cuts: list[int], ascii_only: bool) -> None:
    lines = [json.dumps(one, ensure_ascii=ascii_only).encode() for one in objects]
    body = b"".join(b"event: chunk\ndata: " + line + b"\n\n" for line in lines) + b"data: [DONE]\n\n"
    found = fed(body, cuts)
    told = [json.loads(line[6:]) for line in found.split(b"\n") if line.startswith(b"data: ") and b"[DONE]" not in line]
    assert told == [renamed(one) for one in objects]
    if all(renamed(one) == one for one in objects):
        assert found == body


@given(st.binary(max_size=300), st.lists(st.integers(0, 4000), max_size=9))
def test_whatever_comes_is_passed_on(body: bytes, cuts: list[int]) -> None:
    assert fed(body, cuts) == body


@pytest.mark.parametrize("length", [10, 2040, 2050, 9000])
@pytest.mark.parametrize("step", [1, 7, 500])
def test_a_long_text_is_passed_on_before_its_end(length: int, step: int) -> None:
    text = '"\\ "model":"' * (length // 12)
    body = json.dumps({"text": text, "model": SHOWN, "choices": [{"model": SHOWN}]}).encode()
    renamer, out, most = ModelRenamer(SHOWN, ASKED), b"", 0
    for at in range(0, len(body), step):
        out += renamer.feed(body[at : at + step])
        most = max(most, at + step - len(out))
    out += renamer.feed(b"", end=True)
    assert json.loads(out) == {"text": text, "model": ASKED, "choices": [{"model": SHOWN}]}
    assert most <= 2048 + step + len(ASKED)
