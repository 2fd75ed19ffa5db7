"""A setting is declared once: its flag, bounds, variable and secrecy follow from the field."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from treeline_wire.settings import (
    ConfigError,
    add_flags,
    check,
    namespace,
    port_setting,
    setting,
    settings_of,
    shown,
    values,
)


def yes_or_no(text: str) -> bool:
    return {"yes": True, "no": False}[text]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kitchen:
    """One setting of each kind."""

    name: str = setting(help="what it is called")
    cooks: int | None = setting(None, at_least=1, help="default: as many as there are stoves")
    share: float = setting(0.5, above=0, at_most=1, help="default: %(default)s")
    wait: float = setting(0.0, metavar="S", at_least=0, help="seconds")
    door: int = port_setting(80, help="default: %(default)s")
    windows: tuple[int, ...] = port_setting((443, 8443), flag="--window", least=1, repeated=True, help="ports")
    style: Literal["plain", "rich"] = setting("plain", help="of the food")
    stars: int = setting(0, choices=(0, 1, 2, 3), help="of the guide")
    recipes: Path | None = setting(None, help="a folder")
    town: str = setting("default", env="TOWN", parse=namespace, help="where it is")
    open: bool = setting(False, help="for guests")
    smoke: bool = setting(True, either=True, help="allowed")
    music: bool = setting(None, parse=yes_or_no, metavar="BOOL", help="allowed, or not")
    key: str | None = setting(None, group="safe", env="KEY", secret=True, help="to all")
    rats: int = setting(0, group=None, at_most=3, help="for Python alone")
    opened_at: float = 0.0

    def __post_init__(self) -> None:
        check(self)


def cli(argv: str = "", **environ: str) -> Kitchen:
    parser = argparse.ArgumentParser(prog="kitchen")
    add_flags(parser, Kitchen, environ=environ)
    add_flags(parser.add_argument_group("safe"), Kitchen, "safe", environ)
    return Kitchen(**values(Kitchen, parser.parse_args(["--name", "k", *argv.split()])))


K = Kitchen(name="k")


def test_without_flags_the_command_line_gives_the_defaults() -> None:
    assert cli() == K
    with pytest.raises(SystemExit):
        cli("--name")


def test_flags_set_their_fields() -> None:
    k = cli("--cooks 3 --share 1 --wait 2.5 --door 0 --stars 3 --style rich --recipes /tmp --open --no-smoke")
    assert (k.cooks, k.share, k.wait, k.door) == (3, 1.0, 2.5, 0)
    assert (k.stars, k.style, k.recipes) == (3, "rich", Path("/tmp"))
    assert (k.open, k.smoke, k.music, k.rats) == (True, False, None, 0)
    assert cli("--window 2 --window=1 --window 2").windows == (2, 1)


def test_a_bool_that_is_parsed_may_be_given_with_a_value_and_without() -> None:
    assert cli("--music").music is True
    assert cli("--music --open").music is True
    assert cli("--music=no --smoke") == dataclasses.replace(K, music=False)


def test_a_variable_applies_without_the_flag_and_has_the_same_checks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    k = cli(TOWN="ulm", KEY="k")
    assert (k.town, k.key) == ("ulm", "k")
    assert cli("--town bonn", TOWN="No Town").town == "bonn"
    assert cli(TOWN="", KEY="") == K, "an empty variable sets nothing"
    with pytest.raises(SystemExit):
        cli(TOWN="No Town")
    assert "argument --town: 'No Town' is no namespace (a-z, 0-9 and -)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ("--cooks many", "--cooks: expected a whole number, got 'many'"),
        ("--share much", "--share: expected a number, got 'much'"),
        ("--wait long", "--wait: expected seconds, got 'long'"),
        ("--wait inf", "--wait: must be at least 0, got inf"),
        ("--share nan", "--share: must be above 0 and at most 1, got nan"),
        ("--door 65536", "--door: must be at least 0 and at most 65535, got 65536"),
        ("--window 0", "--window: must be at least 1 and at most 65535, got 0"),
        ("--style poor", "--style: invalid choice: 'poor'"),
        ("--stars 4", "--stars: invalid choice: 4"),
        ("--rats 1", "unrecognized arguments: --rats"),
        ("--no-open", "unrecognized arguments: --no-open"),
    ],
)
def test_errors_name_the_flag_and_what_is_expected(argv: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli(argv)
    assert end.value.code == 2
    assert told in capsys.readouterr().err


@given(st.sampled_from(["share", "wait"]), st.integers(-3, 3) | st.floats(-2, 2) | st.just(float("inf")))
def test_flags_and_python_accept_the_same_values(name: str, value: float) -> None:
    try:
        by_flag = cli(f"--{name}={value}")
    except SystemExit:
        with pytest.raises(ConfigError, match=f"^{name} must be (at least|above) 0"):
            dataclasses.replace(K, **{name: value})
    else:
        assert by_flag == dataclasses.replace(K, **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "bounds"),
    [
        ("cooks", 0, "at least 1, got 0"),
        ("rats", 4, "at most 3, got 4"),
        ("share", 0, "above 0 and at most 1, got 0"),
        ("windows", (443, 0), "at least 1 and at most 65535, got 0"),
        ("cooks", "many", "at least 1, got 'many'"),
        ("style", "RICH", "plain or rich, got 'RICH'"),
        ("stars", 5, "0, 1, 2 or 3, got 5"),
    ],
)
def test_bounds_and_choices_hold_without_flags_and_for_each_value_of_a_list(
    name: str, value: object, bounds: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be {bounds}$"):
        dataclasses.replace(K, **{name: value})


def test_only_secrets_are_hidden_and_only_if_set() -> None:
    assert shown(dataclasses.replace(K, key="k"))["key"] == "(set)"
    assert shown(K) == {name: getattr(K, name) for name in settings_of(Kitchen)}
    assert "opened_at" not in shown(K), "no setting"


def test_help_describes_each_flag() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, Kitchen, environ={})
    add_flags(parser, Kitchen, "safe", {"KEY": "in the environment"})
    text = parser.format_help()
    for word in (
        "--window",
        "--smoke, --no-smoke",
        "--music [BOOL]",
        "{plain,rich}",
        "default: 80",
    ):
        assert word in text
    assert "--rats" not in text
    assert "in the environment" not in text


def test_a_parser_that_has_only_some_groups_gives_only_their_fields() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, Kitchen, "safe", {})
    assert values(Kitchen, parser.parse_args(["--key", "k"])) == {"key": "k"}


@pytest.mark.parametrize("name", ["", "a/b", "a-", "My_Team", "x" * 64, "a\n"])
def test_a_namespace_that_cannot_exist_is_refused(name: str) -> None:
    assert namespace("team-1") == "team-1"
    with pytest.raises(argparse.ArgumentTypeError, match="is no namespace"):
        namespace(name)


def test_a_text_is_no_bool() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Switch:
        jumps: bool = setting(True, help="whether it jumps")

    check(Switch(jumps=False))
    with pytest.raises(ConfigError, match=r"^jumps must be False or True, got 'off'$"):
        check(Switch(jumps="off"))  # type: ignore[arg-type]
