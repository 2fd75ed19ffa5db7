"""Durations and booleans as Go spells them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from treeline_epp.compat.values import go_bool, seconds


@pytest.mark.parametrize(
    ("text", "value"),
    [("30s", 30.0), ("1m30s", 90.0), ("500ms", 0.5), ("1.5h", 5400.0), ("2", 2.0), ("0", 0.0), (".5s", 0.5)],
)
def test_durations(text: str, value: float) -> None:
    assert seconds(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "soon", "30 s", "-1s", "-1", "inf", "nan", "1s2", "1d", "s", "1e400"])
def test_no_durations(text: str) -> None:
    with pytest.raises(ValueError, match="duration"):
        seconds(text)


@given(st.text("0123456789.hmsnuµe-+ ", max_size=12))
def test_any_text_is_a_duration_or_refused(text: str) -> None:
    try:
        value = seconds(text)
    except ValueError:
        return
    assert 0 <= value < float("inf")


def test_booleans() -> None:
    assert [go_bool(text) for text in ("1", "t", "TRUE", "True", "0", "F", "false")] == [True] * 4 + [False] * 3
    with pytest.raises(ValueError, match="neither"):
        go_bool("yes")
