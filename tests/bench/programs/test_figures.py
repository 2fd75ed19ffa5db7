"""Rows and the table."""

from __future__ import annotations

import pytest
from treeline_bench.programs.figures import Measured, rows_of
from treeline_bench.programs.oracle import Found

NONE = Measured(10, 5.0, Found(1000, 0), latency_s=2.0)
FULL = Measured(10, 1.0, Found(1000, 720, 750), latency_s=0.5)
OTHER = Measured(10, 2.0, Found(1000, 500))


def values(measured: dict[str, dict[str, Measured]]) -> dict[str, float]:
    return {row.metric: row.value for row in rows_of(measured, {})}


def test_summary_rows_come_first() -> None:
    slower = Measured(10, 4.0, Found(100, 100, 100), latency_s=2.0)
    measured = {"mmlu": {"none": NONE, "no_hint": OTHER, "full": FULL}, "rag": {"none": NONE, "full": slower}}
    found = values(measured)
    assert next(iter(found)) == "programs.hit_vs_optimal.min"
    assert found["programs.hit_vs_optimal.min"] == found["programs.hit_vs_optimal.mmlu"] == 0.96
    assert found["programs.throughput_full_over_none.mmlu"] == 5.0
    assert found["programs.throughput_full_over_none.geomean"] == pytest.approx((5 * 1.25) ** 0.5)
    assert found["programs.latency_full_over_none.geomean"] == pytest.approx((0.25 * 1.0) ** 0.5)
    assert found["programs.throughput.mmlu.no_hint"] == 5.0


def test_rows_stand_beside_their_references() -> None:
    rows = {row.metric: row for row in rows_of({"mmlu": {"none": NONE, "full": FULL}}, {})}
    assert (rows["programs.throughput.mmlu.full"].reference, rows["programs.throughput.mmlu.full"].ratio) == (2.0, 5.0)
    assert rows["programs.throughput.mmlu.none"].reference is None
    assert (rows["programs.hit_rate.mmlu.full"].value, rows["programs.hit_rate.mmlu.full"].reference) == (0.72, 0.75)


def test_a_part_of_a_run_has_a_part_of_the_rows() -> None:
    assert set(values({"mmlu": {"no_hint": OTHER}})) == {
        "programs.throughput.mmlu.no_hint",
        "programs.hit_rate.mmlu.no_hint",
    }
    assert "programs.throughput_full_over_none.geomean" not in values({"mmlu": {"full": FULL}})


def test_the_worse_of_two_forms_counts() -> None:
    found = {row.metric: row.value for row in rows_of({}, {"chats": 3.0, "completions": 2.5})}
    assert found == {
        "programs.api_speculation_call_ratio": 2.5,
        "programs.api_speculation_call_ratio.chats": 3.0,
        "programs.api_speculation_call_ratio.completions": 2.5,
    }
