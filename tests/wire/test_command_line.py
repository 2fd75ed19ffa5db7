"""Errors for a mistyped command: three lines, however many flags there are."""

from __future__ import annotations

import io
import re
import sys

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


def test_an_error_stands_between_a_hint_and_the_way_to_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint(kitchen(), capsys, "--pot-7", "much") == [
        "usage: kitchen [OPTIONS]",
        "kitchen: error: argument --pot-7: invalid int value: 'much'",
        "Try 'kitchen --help'.",
    ]


def test_the_hint_names_positional_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    parser = kitchen()
    parser.add_argument("dish", metavar="DISH")
    parser.add_argument("guests", metavar="GUEST", nargs="*")
    assert complaint(parser, capsys)[0] == "usage: kitchen [OPTIONS] DISH [GUEST ...]"


def test_the_first_line_of_a_given_usage_is_the_hint(capsys: pytest.CaptureFixture[str]) -> None:
    parser = kitchen(usage="%(prog)s WORD [FLAG …]\n       %(prog)s --list")
    assert complaint(parser, capsys, "--oven")[0] == "usage: kitchen WORD [FLAG …]"


def test_all_commands_report_errors_alike(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="kitchen")
    parser.add_subparsers(required=True, metavar="WORD").add_parser("bake")
    assert complaint(parser, capsys)[0] == "usage: kitchen [OPTIONS] WORD ..."
    assert complaint(parser, capsys, "bake", "--hot") == [
        "usage: kitchen [OPTIONS] WORD ...",
        "kitchen: error: unrecognized arguments: --hot",
        "Try 'kitchen --help'.",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--pott-7", "3"], "unrecognized arguments: --pott-7 3; did you mean --pot-7?"),
        (["--pott-7=3"], "unrecognized arguments: --pott-7=3; did you mean --pot-7?"),
        (["--pot-3", "1", "--", "--pott-7"], "unrecognized arguments: -- --pott-7"),
        (["--xyzzy"], "unrecognized arguments: --xyzzy"),
    ],
)
def test_a_mistyped_flag_is_answered_with_the_intended_one(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert complaint(kitchen(), capsys, *words)[1] == f"kitchen: error: {said}"


def test_the_suggested_flag_belongs_to_the_given_command(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="kitchen")
    words = parser.add_subparsers()
    words.add_parser("bake").add_argument("--heat")
    words.add_parser("fry").add_argument("--heap")
    assert "did you mean --heat?" in complaint(parser, capsys, "bake", "--heatt", "9")[1]
    assert (
        "invalid choice: 'bakee' (choose from 'bake', 'fry'); did you mean bake?"
        in complaint(parser, capsys, "bakee")[1]
    )


def test_help_has_colours_only_on_a_terminal_and_not_with_no_color(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def shown(file: io.StringIO) -> str:
        kitchen(description="In [brackets] and `ticks`").print_help(file)
        return file.getvalue()

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich looks at: its own idea of a terminal is this process's
    plain, coloured = shown(io.StringIO()), shown(Terminal())
    assert "\x1b[" not in plain
    assert re.search(r"\x1b\[[0-9;]*m--pot-3", coloured)
    assert "[brackets]" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown(Terminal()) == plain
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setitem(sys.modules, "rich_argparse", None)
    assert shown(Terminal()) == plain


def test_help_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kitchen().parse_args(["--help"])
    assert "--pot-89" in capsys.readouterr().out
