"""The benchmark `forms-sim`: its ratios, and that each row is described."""

from pathlib import Path

import pytest
from support.bench import Remembered
from treeline_bench import forms_sim as benchmark
from treeline_bench.context import Context
from treeline_bench.registry import BENCHMARKS
from treeline_sim.figures import Figures


def figures(ttft_p90: float, itl_p99: float, request: float, **forms: int) -> Figures:
    return Figures("p", 10, 0.5, 1.0, ttft_p90, 9.0, 1.0, 0, 0.3, 0, 60.0, itl_p99, request, forms)


def test_ours_is_compared_with_the_better_of_the_others_in_each_figure() -> None:
    found = {
        "ours": [figures(30.0, 6.0, 1.0, apart=3), figures(50.0, 6.0, 1.0, apart=4, pull=1)],
        "never": [figures(20.0, 20.0, 2.0)] * 2,
        "always": [figures(80.0, 5.0, 1.25, apart=10)] * 2,
    }
    rows = {row.metric: row for row in benchmark.rows_of("t", found)}
    assert rows["forms.ttft_p90_vs_best.t"].value == 2.0
    assert rows["forms.itl_p99_vs_best.t"].value == pytest.approx(1.2)
    assert rows["forms.request_vs_best.t"].value == pytest.approx(0.8)
    assert rows["forms.ttft_p90_ms.t.ours"].value == 40.0
    assert (rows["forms.apart.t"].value, rows["forms.pull.t"].value) == (7, 1)


def test_the_benchmark_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "SEEDS", (1,))
    rows = BENCHMARKS["forms-sim"].run(Context(Remembered(), tmp_path, quick=True))
    assert {f"forms.request_vs_best.{trace.name}" for trace, _, _ in benchmark.MIXES} <= {row.metric for row in rows}
    assert all(row.value > 0 for row in rows if "_ms" in row.metric)
