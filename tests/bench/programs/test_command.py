"""The command: its arguments, its server, its files, its exit."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from treeline_bench import cli
from treeline_bench.context import MODEL, Display
from treeline_bench.processes import child
from treeline_bench.programs import command
from treeline_bench.programs.ablations import ABLATIONS, FULL, Ablation, Serving
from treeline_bench.programs.command import command_of, main
from treeline_bench.programs.figures import Measured
from treeline_bench.programs.oracle import Found
from treeline_bench.programs.run import Plan, Ran
from treeline_bench.programs.workloads import WORKLOADS
from treeline_bench.results import read_result
from treeline_runtime.args import parse_args

pytestmark = pytest.mark.usefixtures("signals")


def test_help_lists_every_choice(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        cli.main(["programs", "--help"])
    assert ending.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*WORKLOADS, *ABLATIONS))


@pytest.mark.parametrize(
    "wrong",
    ["--workload nothing", "--programs 0", "--scale nan", "--ablation", "--workload extraction --ablation none"],
)
def test_a_wrong_command_line_ends_with_2(wrong: str) -> None:
    with pytest.raises(SystemExit) as ending:
        main(wrong.split())
    assert ending.value.code == 2


def test_a_result_tells_its_command_without_a_path() -> None:
    argv = ["--scale", "1", "--model", "/home/me/llama8b", "--out", "/tmp/x", "--programs", "64"]
    assert command_of(argv) == "treeline bench programs --scale 1 --model llama8b --programs 64"
    assert command_of(["--model=/home/me/tiny", "--out=/tmp/x"]) == "treeline bench programs --model tiny"


@pytest.mark.parametrize("name", ABLATIONS)
def test_a_server_takes_the_flags_of_each_ablation_and_ours_win(name: str) -> None:
    serving = Serving(MODEL, "cpu", 1000, "--page-size 16 --load-format dummy")
    argv = serving.command(ABLATIONS[name], 20_001, 20_002)
    args = parse_args(argv[argv.index("serve") + 1 :])
    assert (args.page_size, args.max_total_tokens, args.load_format) == (16, 1000, "dummy")
    assert (args.prefix_cache, args.schedule_policy) == (ABLATIONS[name].cache, ABLATIONS[name].policy)


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def stand_in(plan: Plan, serving: Serving, folder: Path, display: Display) -> Ran:
    assert folder.is_dir()
    display.phase("measuring")
    one = Measured(10, 1.0, Found(1000, 750, 750), latency_s=1.0)
    table = {workload.name: {ablation.name: one for ablation in plan.ablations} for workload in plan.workloads}
    return Ran(table, {"chats": 3.0, "completions": 3.0} if plan.extraction else {})


def test_a_whole_run_leaves_json_a_page_and_a_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "run", stand_in)
    assert main(["--out", str(tmp_path)]) == 0
    assert read_result(tmp_path / "programs.json").value("programs.hit_vs_optimal.min") == 1
    assert (tmp_path / "programs.md").read_text().startswith("# Programs")
    assert (tmp_path / "programs.svg").exists()
    assert read_result(tmp_path / "programs.json").value("programs.api_speculation_call_ratio") == 3
    assert "| LLM judge | 10 |" in capsys.readouterr().out


def test_a_partial_run_is_printed_and_writes_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "run", stand_in)
    monkeypatch.setattr(command, "ROOT", tmp_path)
    assert main(["--workload", "mmlu", "rag", "--ablation", "none", "full"]) == 0
    assert "| MMLU | 10 | 10 | 75.0% | 100.0% |" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_does_not_start_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--workload", "mmlu", "--ablation", "full", "--server-args=--no-such-flag"]) == 1
    assert "no-such-flag" in capsys.readouterr().err


@pytest.mark.integration
@pytest.mark.deep
def test_programs_run_on_a_real_server_and_hit_its_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = children()
    argv = "--workload hellaswag judge json_decode extraction --ablation full --programs 2 --scale 0.05 --device cpu"
    assert main([*argv.split(), "--out", str(tmp_path)]) == 0
    result = read_result(tmp_path / "programs.json")
    for name in ("hellaswag", "judge", "json_decode"):
        hits = result.row(f"programs.hit_rate.{name}.{FULL.name}")
        assert 0.3 < hits.value <= float(hits.reference or 0) + 1e-6, name  # values are rounded
    assert result.value("programs.hit_vs_optimal.min") > 0.9
    assert result.value("programs.api_speculation_call_ratio") == 3, "three fields by one call, chats and completions"
    assert children() <= before
    assert "LLM judge" in capsys.readouterr().out


def test_an_interrupt_ends_the_server_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = children()

    @contextlib.contextmanager
    def start(serving: Serving, ablation: Ablation, folder: Path) -> Iterator[str]:
        with child("server", ["sleep", "600"], folder):
            yield "http://127.0.0.1:9"

    def interrupted(*_: object) -> Measured:
        assert children() > before, "the server is there"
        os.kill(os.getpid(), signal.SIGTERM)
        signal.sigtimedwait([], 5)  # a handler runs here at the latest
        raise AssertionError("not interrupted")

    monkeypatch.setattr(Serving, "start", start)
    monkeypatch.setattr("treeline_bench.programs.run._measure", interrupted)
    assert main(["--workload", "mmlu", "--ablation", "full"]) == 130
    assert children() <= before
    assert "everything is stopped" in capsys.readouterr().err
