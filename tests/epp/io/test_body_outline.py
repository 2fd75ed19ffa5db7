"""The outline of a body and edits by it, against decoders, for any bytes."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treeline_epp.requests import rewrite
from treeline_epp.requests.body import CHUNK_BYTES, Body, Edit
from treeline_epp.requests.outline import Outline, beginning
from treeline_wire.json_values import count_values

NAMES = st.sampled_from(["model", "messages", "a", "é", 'q"', "back\\slash", ""]) | st.text(max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text('ab"\\{}[],:é漢 \n', max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(NAMES, VALUES, max_size=6), st.integers(1, 40), st.booleans(), st.sampled_from([None, 1]))
def test_an_outline_finds_the_members_that_a_decoder_finds(
    document: dict[str, Any], piece: int, ascii_only: bool, indent: int | None
) -> None:
    data = json.dumps(document, ensure_ascii=ascii_only, indent=indent).encode(errors="surrogatepass")
    body = Body([data[start : start + piece] for start in range(0, len(data), piece)])
    outline = Outline()
    for part in body.pieces():
        outline.feed(part)
    outline.finish(body)
    assert outline.problem is None
    found = {name: msgspec.json.decode(body.slice(*places[-1])) for name, places in outline.spans.items()}
    assert found == document


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60), st.integers(1, 20))
def test_an_outline_of_anything_ends_with_members_or_a_problem(data: bytes, piece: int) -> None:
    body = Body([data[start : start + piece] for start in range(0, len(data), piece)])
    outline = Outline()
    for part in body.pieces():
        outline.feed(part)
    outline.finish(body)
    try:
        document = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return
    if isinstance(document, dict):
        assert outline.problem is None
        assert set(outline.spans) == set(document)
    else:
        assert outline.problem is not None


@settings(max_examples=200, deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=6), st.data())
def test_the_beginning_of_a_list_is_a_beginning_of_its_elements(elements: list[Any], data: st.DataObject) -> None:
    raw = json.dumps(elements, ensure_ascii=False).encode()
    assert count_values(raw) >= len(elements)
    stop = data.draw(st.integers(1, len(raw)))
    most = data.draw(st.integers(1, 50))
    found = beginning(raw[:stop], whole=stop == len(raw), max_values=most)
    if not found.cut:
        assert found.value == elements
        return
    if isinstance(found.value, list):
        assert found.value[:-1] == elements[: max(0, len(found.value) - 1)]
        assert found.complete == elements[: len(found.complete)]
        assert len(found.value) - len(found.complete) in (0, 1)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=9), st.data())
def test_a_body_is_sliced_and_edited_like_its_bytes(parts: list[bytes], data: st.DataObject) -> None:
    body, plain = Body(parts), b"".join(parts)
    start = data.draw(st.integers(0, len(plain)))
    stop = data.draw(st.integers(start, len(plain)))
    assert body.slice(start, stop) == plain[start:stop]
    edited = body.edited([Edit(start, stop, b"new")])
    assert edited.joined() == plain[:start] + b"new" + plain[stop:]
    assert body.joined() == plain


def test_pieces_are_chunks_of_the_size_that_a_proxy_takes() -> None:
    body = Body()
    for size in (1, 3 * CHUNK_BYTES + 5, 2, 2, CHUNK_BYTES - 1, 7):
        body.add(b"x" * size)
    sizes = [len(piece) for piece in body.pieces()]
    assert sum(sizes) == len(body) == 4 * CHUNK_BYTES + 16
    assert max(sizes) <= CHUNK_BYTES + 7
    tiny = Body()
    for _ in range(2 * CHUNK_BYTES):
        tiny.add(b"y")
    assert [len(piece) for piece in tiny.pieces()] == [CHUNK_BYTES, CHUNK_BYTES]


PIECES = st.sampled_from(
    [
        *(b"{", b"}", b"[", b"]", b",", b":", b" ", b'"', b"\\"),
        *(b'"cache_salt":"mine"', b'"cache\\u005fsalt":1', b'"a":[1,{"b":"}"}]'),
    ]
)


@settings(max_examples=400)
@given(st.lists(PIECES, max_size=14))
def test_every_decoder_of_an_edited_body_reads_the_new_values(pieces: list[bytes]) -> None:
    """Any decoder reads our value from any edited body, whichever of two equal members it takes."""
    plain = b"".join(pieces)
    for text in (plain, b"{" + plain + b"}", b"{," + plain + b"}"):
        body, outline = Body([text]), Outline()
        for piece in body.pieces():
            outline.feed(piece)
        outline.finish(body)
        if outline.problem is not None:
            continue
        edited = rewrite.edited(body, outline, None, {"cache_salt": "ours", "extra_key": None}).joined()
        pairs: list[tuple[str, Any]] = []

        def keep(found: list[tuple[str, Any]], pairs: list[tuple[str, Any]] = pairs) -> dict[str, Any]:
            pairs[:] = found  # the outermost object comes last
            return dict(found)

        try:
            json.loads(edited, object_pairs_hook=keep)
        except ValueError:
            continue  # every receiver refuses it
        assert {value for name, value in pairs if name == "cache_salt"} == {"ours"}
        assert {value for name, value in pairs if name == "extra_key"} <= {None}


@pytest.mark.parametrize("start", [b"{,", b"{ ,", b"{,,"])
def test_a_body_that_begins_with_a_comma_is_no_json(start: bytes) -> None:
    body, outline = (
        Body([start + b'"cache_salt":"mine","model":"m","prompt":"' + b"x" * 300_000 + b'"}']),
        Outline(),
    )
    for piece in body.pieces():
        outline.feed(piece)
    outline.finish(body)
    assert outline.problem == "The request body is not JSON."
