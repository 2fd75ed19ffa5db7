"""`treeline sim` as a user runs it."""

import json
from pathlib import Path

import pytest
from treeline.main import main as treeline
from treeline_sim import command
from treeline_sim.figures import Figures

SHORT = ["run", "--trace", "zipf", "--requests", "60", "--endpoints", "2"]


@pytest.fixture(autouse=True)
def _interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "take_interrupts", lambda: None)


def test_policies_are_shown_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert treeline(["sim", *SHORT, "--policy", "round_robin,oracle"]) == 0
    header, first, second, bound = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["policy", "hit", "rate"]
    assert (first.split()[0], second.split()[0]) == ("round_robin", "oracle")
    assert bound.startswith("one endless cache")


def test_the_report_can_be_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([*SHORT, "--policy", "random,hit_oracle", "--json", "--event-loss", "0.01"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["policy"] for one in found["policies"]] == ["random", "hit_oracle"]
    assert found["ratios"]["random"]["hit_vs_oracle"] <= 1.0
    assert found["policies"][0]["requests"] == 60


def test_ctrl_c_reports_the_finished_policies(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate = command.simulate

    def interrupted(plan: command.Plan, policy: str, *rest: object) -> Figures:
        if policy == "oracle":
            raise KeyboardInterrupt
        return simulate(plan, policy)

    monkeypatch.setattr(command, "simulate", interrupted)
    assert command.main([*SHORT, "--policy", "random,oracle,round_robin"]) == 130
    shown = capsys.readouterr()
    assert "random" in shown.out
    assert "round_robin" not in shown.out
    assert "after 1 of 3" in shown.err
    assert command.main([*SHORT, "--policy", "oracle"]) == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--trace", "nothing"], "150x5"),
        (["--trace", "zipf", "--policy", "best"], "round_robin"),
        (["--trace", "zipf", "--policy", ","], "round_robin"),
        (["--trace", "zipf", "--restart", "engine:0"], "engine:0@30"),
        (["--trace", "zipf", "--restart", "engine:8@1"], "no engine 8"),
        (["--trace", "zipf", "--restart", "picker:1@1"], "no picker 1"),
        (["--trace", "zipf", "--event-loss", "1"], "a share"),
        (["--trace", "zipf", "--endpoints", "0"], "--endpoints"),
        (["--trace", "zipf", "--pickers", "-1"], "--pickers"),
        (["--trace", "zipf", "--rate", "-1"], "--rate"),
        (["--trace", "zipf", "--rate", "nan"], "--rate"),
        (["--trace", "zipf", "--kv-tokens", "5"], "two blocks"),
        (["--trace", "zipf", "--speedup", "2"], "--rate"),
        (["--trace-file", "x", "--rate", "2"], "--speedup"),
        ([], "required"),
    ],
)
def test_a_wrong_command_line_says_what_to_do(wrong: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["run", *wrong])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_an_unreadable_trace_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n")
    assert command.main(["run", "--trace-file", str(bad)]) == 1
    assert "line 1" in capsys.readouterr().err
    assert command.main(["run", "--trace-file", str(tmp_path / "none.jsonl")]) == 1
    assert "No such file" in capsys.readouterr().err
