import json
import socket
from pathlib import Path

import pytest
from support.bench import INVENTED, invented_result
from treeline_bench.machine import this_machine, versions
from treeline_bench.metrics import METRICS, metric, row
from treeline_bench.report import BEGIN, END, MarkersMissing, missed_page, page, replace_between_markers, summary
from treeline_bench.results import ResultError, number, read_result, read_results, write_result


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    result = invented_result("picker")
    assert read_result(write_result(result, tmp_path)) == result


def test_the_file_has_the_agreed_keys(tmp_path: Path) -> None:
    found = json.loads(write_result(invented_result("tree"), tmp_path).read_text())
    assert list(found) == ["benchmark", "date", "machine", "versions", "command", "rows"]
    assert set(found["machine"]) == {"cores", "cpu_model", "memory_gib", "os"}
    assert all(list(each) == ["metric", "value", "unit", "reference", "ratio"] for each in found["rows"])


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tree.json").write_text('{"benchmark": "tree"}')
    with pytest.raises(ResultError, match=r"tree\.json"):
        read_results(tmp_path, ["picker", "tree"])


def test_a_row_is_compared_with_its_reference() -> None:
    assert row("picker.added_ms.p50", 1.0).ratio == 0.5
    assert row("routing.ttft_ms.p50.treeline", 30, 120).ratio == 0.25
    assert row("routing.errors.random", 3).ratio is None


def test_a_metric_is_found_by_its_beginning() -> None:
    assert metric("routing.hit_rate.random") is METRICS["routing.hit_rate"]
    with pytest.raises(KeyError, match=r"routing\.hit_rate"):
        metric("nonsense.x")


def test_the_machine_is_described_without_its_name() -> None:
    text = str(this_machine()) + str(versions())
    assert this_machine().cores >= 1
    assert versions()["treeline"]
    assert socket.gethostname() not in text
    assert str(Path.home()) not in text


@pytest.mark.parametrize(
    ("value", "text"), [(412_345.6, "412,346"), (16, "16"), (0.8235, "0.824"), (1.05, "1.05"), (0, "0")]
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


def test_the_page_has_a_line_for_every_row() -> None:
    result = invented_result("routing")
    text = page(result, "A title")
    assert text.startswith("# A title\n")
    assert all(f"| {each.metric} |" in text for each in result.rows)
    assert "2026-11-20" in text
    assert "0.824 (oracle)" in text


def test_the_summary_has_headlines_with_dates_and_commands() -> None:
    text = summary([invented_result(name) for name in INVENTED])
    line = next(line for line in text.splitlines() if metric("picker.added_ms.p50").meaning in line)
    assert "≤ 2" in line
    assert "2026-11-20" in line
    assert "`python -m treeline_bench picker`" in line
    assert metric("picker.bare_ms.p50").meaning not in text


def test_figures_that_miss_their_bound_are_counted_and_the_furthest_come_first() -> None:
    result = invented_result("picker")
    result.rows[:] = [row("picker.added_ms.p50", 3), row("picker.added_ms.p99", 1), row("tree.ingest_blocks_s", 1e5)]
    result.rows.append(row("routing.ttft_ms.p50.treeline", 9, 3))  # a neighbour of the same run is no bound
    assert "2 of 3 figures with a bound miss it." in summary([result])
    assert f"{metric('tree.ingest_blocks_s').meaning} (100,000 blocks/s, ≥ 400,000)" in summary([result])
    listed = missed_page([result])
    assert "| `picker.added_ms.p50` | 3 | ms | ≤ 2 |" in listed
    assert listed.index("tree.ingest_blocks_s") < listed.index("picker.added_ms.p50")
    assert "picker.added_ms.p99" not in listed
    assert summary([invented_result("routing")]).strip().endswith("0 of 0 figures with a bound miss it.")


def test_the_readme_keeps_everything_outside_the_markers() -> None:
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    once = replace_between_markers(text, "new\n")
    assert once == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    assert replace_between_markers(once, "new\n") == once


@pytest.mark.parametrize("text", ["no markers", f"{END}\n{BEGIN}"])
def test_without_markers_nothing_is_replaced(text: str) -> None:
    with pytest.raises(MarkersMissing):
        replace_between_markers(text, "new")
