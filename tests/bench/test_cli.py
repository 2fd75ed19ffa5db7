"""The command: its files, its output, its exit. The benchmarks here are stand-ins."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support.bench import INVENTED
from treeline_bench import cli, registry
from treeline_bench.context import ROOT, Benchmark, BenchmarkError, Context
from treeline_bench.metrics import row
from treeline_bench.report import BEGIN, END
from treeline_bench.results import Row, read_result

pytestmark = pytest.mark.usefixtures("signals")

Run = Callable[[Context], list[Row]]


def tree_rows(context: Context) -> list[Row]:
    context.display.phase("measuring", 2)
    context.display.done(2)
    assert context.folder.is_dir()
    return [row(metric, value, reference) for metric, value, reference in INVENTED["tree"]]


def broken(context: Context) -> list[Row]:
    raise BenchmarkError("nothing works")


def interrupted(context: Context) -> list[Row]:
    raise KeyboardInterrupt


def terminated(context: Context) -> list[Row]:
    os.kill(os.getpid(), signal.SIGTERM)
    signal.sigtimedwait([], 5)  # a handler runs here at the latest
    return []


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def put(**runs: Run) -> None:
        for name, run in runs.items():
            monkeypatch.setitem(registry.BENCHMARKS, name, Benchmark(name, "A title", "a summary", run))

    return put


def test_a_run_writes_json_markdown_and_a_plot(
    stand_in: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(tree=tree_rows)
    assert cli.main(["tree", "--out", str(tmp_path)]) == 0
    result = read_result(tmp_path / "tree.json")
    assert result.command == "python -m treeline_bench tree"
    assert (tmp_path / "tree.md").read_text().startswith("# A title")
    assert (tmp_path / "tree.svg").exists()
    assert str(tmp_path) not in (tmp_path / "tree.json").read_text()
    said = capsys.readouterr()
    assert said.out == ""
    assert "tree.match_us.2700" in said.err


def test_a_broken_benchmark_is_reported_and_the_others_go_on(
    stand_in: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(tree=tree_rows, picker=broken)
    assert cli.main(["picker", "tree", "--out", str(tmp_path)]) == 1
    assert (tmp_path / "tree.json").exists()
    assert not (tmp_path / "picker.json").exists()
    assert "picker: nothing works" in capsys.readouterr().err


@pytest.mark.parametrize("ending", [interrupted, terminated])
def test_an_interrupted_run_says_so(
    stand_in: Callable[..., None], ending: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(tree=ending)
    assert cli.main(["tree", "--out", str(tmp_path)]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_readme_is_quoted_and_written(
    stand_in: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(tree=tree_rows)
    cli.main(["tree", "--out", str(tmp_path)])
    readme = tmp_path / "README.md"
    readme.write_text(f"# Title\n{BEGIN}\n{END}\n")
    capsys.readouterr()
    assert cli.main(["--readme", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "figures with a bound miss it" in printed
    assert cli.main(["--readme", str(readme), "--out", str(tmp_path)]) == 0
    assert readme.read_text() == f"# Title\n{BEGIN}\n{printed.strip()}\n{END}\n"
    assert (tmp_path / "missed.md").read_text().startswith("# Figures that miss their bound")


def test_the_readme_quotes_the_measured_figures(tmp_path: Path) -> None:
    for committed in (ROOT / "bench" / "results").glob("*.json"):
        shutil.copy(committed, tmp_path)
    readme = tmp_path / "README.md"
    shutil.copy(ROOT / "README.md", readme)
    assert cli.main(["--readme", str(readme), "--out", str(tmp_path)]) == 0
    assert readme.read_text() == (ROOT / "README.md").read_text(), "run `make bench ARGS='--readme README.md'`"
    assert (tmp_path / "missed.md").read_text() == (ROOT / "bench" / "results" / "missed.md").read_text()


def test_without_results_the_readme_quotes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--readme", "--out", str(tmp_path)]) == 1
    assert "no results yet" in capsys.readouterr().err


def test_an_unknown_name_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        cli.main(["nonsense"])
    assert ending.value.code == 2
    assert "picker, gie, routing, routing-sim, forms-sim, media-sim, tree" in capsys.readouterr().err


def test_listing_and_help_name_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--list"]) == 0
    listed = capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    helped = capsys.readouterr().out
    assert all(name in listed and name in helped for name in registry.BENCHMARKS)


def test_a_corpus_belongs_to_structured_and_has_schemas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for names, said in ((["tree"], "belongs to structured alone"), (["structured"], "`make corpora` makes")):
        with pytest.raises(SystemExit) as ending:
            cli.main([*names, "--corpus", str(tmp_path)])
        assert ending.value.code == 2
        assert said in capsys.readouterr().err


def test_outside_a_checkout_only_servers_can_be_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "ROOT", tmp_path)
    with pytest.raises(SystemExit):
        cli.main(["tree"])
    assert "clone Treeline and run `make bench`" in capsys.readouterr().err
