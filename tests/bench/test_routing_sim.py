"""The benchmark `routing-sim`: its rows, and that each is described."""

from pathlib import Path

import pytest
from support.bench import Remembered
from treeline_bench import routing_sim as benchmark
from treeline_bench.context import Context
from treeline_bench.plots import plot
from treeline_bench.registry import BENCHMARKS
from treeline_bench.report import page
from treeline_bench.results import Machine, Result
from treeline_sim.figures import Figures
from treeline_sim.traces import TRACES


def figures(policy: str, hit_rate: float, p90: float) -> Figures:
    return Figures(policy, 10, hit_rate, p90 / 2, p90, 2 * p90, 1000.0, 0, 0.3, 0, 60.0)


def test_ours_is_compared_with_the_better_oracle_and_the_best_other_policy() -> None:
    well = [figures("ours", 0.8, 30.0), figures("a", 0.9, 20.0), figures("b", 0.4, 90.0)]
    well += [figures("oracle", 0.6, 5.0), figures("hit_oracle", 0.85, 50.0)]
    rows = {row.metric: row for row in benchmark.rows_of("zipf", well, well[:1] + well[2:], endless=0.95)}
    assert rows["routing.zipf.hit_vs_oracle"].value == pytest.approx(0.8 / 0.85, abs=1e-5)
    assert rows["routing.zipf.ttft_p90_vs_best"].value == 1.5
    assert rows["routing.zipf.faults.ttft_p90_vs_best"].value == pytest.approx(30 / 90, abs=1e-5)
    assert rows["routing.zipf.hit_rate.b"].reference == 0.95
    assert rows["routing.zipf.errors.oracle"].value == 0


def test_faults_are_for_ours_its_fastest_rivals_and_the_oracles() -> None:
    well = [figures("ours", 0.8, 30.0), figures("slow", 0.9, 90.0), figures("b", 0.4, 20.0), figures("a", 0.4, 40.0)]
    well += [figures("oracle", 0.6, 5.0), figures("hit_oracle", 0.85, 50.0)]
    assert benchmark._rivals(well) == ["ours", "b", "a", "oracle", "hit_oracle"]


def test_the_benchmark_runs_and_its_result_can_be_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: TRACES[name] for name in ("bursts", "multi-turn")}
    monkeypatch.setattr(benchmark, "TRACES", few)
    monkeypatch.setattr(benchmark, "QUICK_REQUESTS", 12)
    rows = BENCHMARKS["routing-sim"].run(Context(Remembered(), tmp_path, quick=True))
    named = {row.metric for row in rows}
    assert {f"routing.{trace}.hit_vs_oracle" for trace in few} <= named
    result = Result("routing-sim", "2026-01-01", Machine(2, "cpu", 4.0, "os"), {}, "command", rows)
    assert "routing.bursts.ttft_p90_vs_best" in page(result, "title")
    assert plot(result, tmp_path / "x.svg").read_text().startswith("<?xml")
