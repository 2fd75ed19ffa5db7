"""Counts a document's values, and finds the numbers that are slow to parse."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from treeline_wire.apis.conversion import many_values
from treeline_wire.json_values import SLOW, count_values, slow_numbers

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**15), 10**15) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=30,
)


def values(document: object) -> int:
    if isinstance(document, dict):
        return 1 + sum(map(values, document.values()))
    return 1 + sum(map(values, document)) if isinstance(document, list) else 1


@given(plain)
def test_every_value_is_counted_and_only_empty_ones_twice(document: object) -> None:
    data = json.dumps(document, ensure_ascii=False).encode()
    assert values(document) <= count_values(data) <= 2 * values(document)
    assert slow_numbers(data) <= len(data) // 2


@pytest.mark.parametrize(
    ("number", "count"),
    [
        ("1", 0),
        ("-12.75", 0),
        ("1234567890123456789", 0),
        ("12345678901234567890", 1),
        ("1e308", 1),
        ("9.092E+300", 1),
        ("7.3e-300", 1),
        ("0." + "0" * 100, 5),
        ("9" * 100 + "e-300", 6),
    ],
)
def test_numbers_with_an_exponent_or_many_digits_take_long(number: str, count: int) -> None:
    assert slow_numbers(number.encode()) == count
    data = f'{{"a": [{number}, "{number}"]}}'.encode()
    assert count_values(data) == 4 + SLOW * count, "what is in strings is not read"
    assert many_values(f"[{number}]") == (2 + SLOW * count if count else 0)
