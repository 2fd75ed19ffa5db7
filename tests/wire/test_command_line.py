"""What whoever mistypes a command reads: three lines, however many flags there are."""

from __future__ import annotations

import pytest
from treeline_wire.command_line import Parser


def complaint(parser: Parser, capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    with pytest.raises(SystemExit) as ending:
        parser.parse_args(words)
    assert ending.value.code == 2
    told = capsys.readouterr()
    assert not told.out
    return told.err.splitlines()


def kitchen(**words: str) -> Parser:
    parser = Parser(prog="kitchen", **words)  # type: ignore[arg-type]
    for number in range(90):
        parser.add_argument(f"--pot-{number}", metavar="LITRES", type=int)
    return parser


def test_an_error_is_below_a_hint_and_above_the_way_to_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint(kitchen(), capsys, "--pot-7", "much") == [
        "usage: kitchen [OPTIONS]",
        "kitchen: error: argument --pot-7: invalid int value: 'much'",
        "Try 'kitchen --help'.",
    ]


def test_the_hint_names_what_has_no_flag(capsys: pytest.CaptureFixture[str]) -> None:
    parser = kitchen()
    parser.add_argument("dish", metavar="DISH")
    parser.add_argument("guests", metavar="GUEST", nargs="*")
    assert complaint(parser, capsys)[0] == "usage: kitchen [OPTIONS] DISH [GUEST ...]"


def test_a_usage_of_ones_own_is_the_hint_by_its_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    parser = kitchen(usage="%(prog)s WORD [FLAG …]\n       %(prog)s --list")
    assert complaint(parser, capsys, "--oven")[0] == "usage: kitchen WORD [FLAG …]"


def test_words_complain_alike(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="kitchen")
    parser.add_subparsers(required=True, metavar="WORD").add_parser("bake")
    assert complaint(parser, capsys)[0] == "usage: kitchen [OPTIONS] WORD ..."
    assert complaint(parser, capsys, "bake", "--hot") == [
        "usage: kitchen [OPTIONS] WORD ...",
        "kitchen: error: unrecognized arguments: --hot",
        "Try 'kitchen --help'.",
    ]


def test_help_still_tells_everything(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kitchen().parse_args(["--help"])
    assert "--pot-89" in capsys.readouterr().out
