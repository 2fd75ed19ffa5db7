"""The command line and the matrix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from treeline.main import main as treeline
from treeline_bench.context import ROOT
from treeline_conformance import report
from treeline_conformance.case import select
from treeline_conformance.command import main, parser, targets_of
from treeline_conformance.picker import PickerError, Target, filled_in
from treeline_conformance.report import Column
from treeline_conformance.verdict import Level, Outcome, Verdict


def targets(*argv: str) -> list[Target]:
    return targets_of(parser("x").parse_args(list(argv)))


def test_pickers_are_named_by_flag_or_by_their_programs() -> None:
    found = targets(
        "--target", "127.0.0.1:9002", "--start", "GIE 1.5=/x/epp --a=b", "--against", "/y/other --c=d {port}"
    )
    assert [(one.name, one.address, one.command) for one in found] == [
        ("127.0.0.1:9002", "127.0.0.1:9002", ""),
        ("GIE 1.5", "", "/x/epp --a=b"),
        ("other", "", "/y/other --c=d {port}"),
    ]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "which picker"),
        (("--target", "nowhere"), "HOST:PORT"),
        (("--target", "h:99999"), "HOST:PORT"),
        (("--start", "a=x", "--start", "a=y"), "same name"),
        (("--start", "a="), "want a command"),
        (("--against", "a=x"), "which picker"),
        (("--timeout", "0", "--start", "x"), "no number of seconds"),
        (("--metrics-port", "x", "--target", "h:1"), "is no port"),
        (("--only", "P99", "--start", "x"), "no case is called"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(
    argv: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_placeholders_in_a_command_are_filled_and_unknown_ones_are_named() -> None:
    values = {"port": "7", "kubeconfig": "/a b/c"}
    assert filled_in("x --p={port} '{kubeconfig}'", values) == (["x", "--p=7", "/a b/c"], {"port", "kubeconfig"})
    for command in ("x {prot}", "x '", ""):
        with pytest.raises(PickerError):
            filled_in(command, values)


def test_a_picker_that_does_not_start_is_a_failure_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--start", "none=/no/such/program {port}", "--only", "P1"]) == 1
    assert "none: /no/such/program cannot be started" in capsys.readouterr().err
    assert main(["--start", "early=false {port}", "--only", "P1"]) == 1
    assert "early: it ended with status 1" in capsys.readouterr().err
    assert main(["--start", "deaf=sleep 60", "--only", "P1"]) == 1
    assert "has no {port}" in capsys.readouterr().err


def test_the_list_has_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert treeline(["conformance", "--list"]) == 0
    said = capsys.readouterr().out
    assert all(f"{one.name} " in said for one in select([]))


def test_the_matrix_shows_the_outcome_of_each_case_and_the_reason(tmp_path: Path) -> None:
    cases = select(["P5.wrong-port", "P9", "P8.fallbacks"])
    passed, failed = (
        Outcome(Verdict.PASS, Verdict.FAIL),
        Outcome(Verdict.FAIL, Verdict.PASS, "seen\nthis", [{"who": "proxy"}]),
    )
    absent = Outcome(Verdict.NOT_APPLICABLE, Verdict.NOT_APPLICABLE, "no")
    outcomes = {one.name: passed for one in cases} | {"P5.wrong-port": failed, "P8.fallbacks": absent}
    columns = [Column("one", "./one {port}", outcomes), Column("two", "./two", {})]
    assert report.counts(columns, report.levels_of(cases)).splitlines()[2:] == [
        "| one | 1 of 2 | 3 of 3 | 0 of 0 |",
        "| two | 0 of 0 | 0 of 0 | 0 of 0 |",
    ]
    assert [one.name for one in report.failed(columns[0], cases, gie15=False)] == ["P5.wrong-port"]
    assert [one.name for one in report.failed(columns[0], cases, gie15=True)] == ["P9.equal@duplex"]
    page = report.page(columns, cases, "command", "python 3")
    assert "| **fail** † |  |" in page
    assert "- `P5.wrong-port` (MUST): seen this" in page
    report.write(tmp_path / "new", page, report.as_json(columns, cases, "command", {}))
    document = json.loads((tmp_path / "new" / "conformance.json").read_bytes())
    assert document["pickers"][0] == {"name": "one", "command": "./one {port}"}
    (found,) = (one for one in document["outcomes"] if one["case"] == "P5.wrong-port")
    expected = {"verdict": "fail", "gie15": "pass", "why": "seen\nthis", "exchange": [{"who": "proxy"}]}
    assert found == {"picker": "one", "case": "P5.wrong-port"} | expected
    assert {one["level"] for one in document["cases"]} <= {level.value for level in Level}


def test_counts_are_quoted_from_a_matrix_between_markers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = select(["P9"])
    outcomes = {one.name: Outcome(Verdict.PASS, Verdict.PASS) for one in cases}
    (tmp_path / "conformance.json").write_bytes(report.as_json([Column("one", "x", outcomes)], cases, "c", {}))
    page = tmp_path / "README.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    assert main(["--readme", str(page), "--out", str(tmp_path)]) == 0
    assert page.read_text().splitlines() == [
        "before",
        report.BEGIN,
        "| picker | MUST | SHOULD | MAY |",
        "| --- | --- | --- | --- |",
        "| one | 1 of 1 | 3 of 3 | 0 of 0 |",
        report.END,
        "after",
    ]
    page.write_text("no place")
    assert main(["--readme", str(page), "--out", str(tmp_path)]) == 1
    (tmp_path / "conformance.json").write_text("{}")
    assert main(["--readme", str(page), "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "there must be one" in said
    assert "is no matrix" in said


def test_the_page_quotes_the_measured_counts(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "conformance.md").read_text()
    copy = tmp_path / "copy.md"
    copy.write_text(page)
    assert main(["--readme", str(copy)]) == 0
    assert copy.read_text() == page


def test_updating_the_page_is_a_command_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--start", "a=true", "--readme", "README.md"])
    assert "give it alone, after the run" in capsys.readouterr().err
