"""The scanner of JSON against Python's own `json`."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.outputs import cut_places, pieces
from treeline_runtime.parsers.json_text import MAX_DEPTH, JsonScanner

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=4), inside, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=4), VALUES, max_size=3)
TEXTS = st.builds(json.dumps, OBJECTS, indent=st.sampled_from([None, 1]), ensure_ascii=st.booleans())


def scanned(parts: list[str]) -> tuple[str, str]:
    """Scan a text in parts. Return what the scanner wrote ("" if it never finished) and what it left."""
    scanner, written, left = JsonScanner(), "", ""
    for part in parts:
        end = 0
        if not (scanner.done or scanner.broken):
            end = scanner.scan(part, 0)
            written += scanner.written
        left += part[end:]
    return written if scanner.done and not scanner.broken else "", left


@given(value=OBJECTS, indent=st.sampled_from([None, 1]), cuts=cut_places)
def test_an_object_is_passed_on_as_it_is_up_to_its_end(
    value: dict[str, Any], indent: int | None, cuts: list[int]
) -> None:
    text = json.dumps(value, indent=indent)
    assert scanned(pieces(f"{text} }}", cuts)) == (text, " }")


@given(
    text=TEXTS,
    places=st.lists(
        st.tuples(st.integers(0, 500), st.sampled_from([*'{}[]",:\\u0123456789.eE+-tfn \n\x01', ""])), max_size=3
    ),
    cuts=cut_places,
)
def test_the_scanner_accepts_exactly_json(text: str, places: list[tuple[int, str]], cuts: list[int]) -> None:
    for place, char in places:
        place %= len(text) + 1
        text = text[:place] + char + text[place + 1 :]
    written, left = scanned([text])
    assert scanned(pieces(text, cuts)) == (written, left)
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        value = None
    if isinstance(value, dict):
        assert left.strip() == ""
        assert json.loads(written) == value
    elif written:
        json.loads(written)


def test_depth_is_bounded() -> None:
    assert scanned(["[" * MAX_DEPTH + "]" * MAX_DEPTH])[0]
    assert not scanned(["[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)])[0]
