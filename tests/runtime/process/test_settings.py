"""The command line of the runtime is made from its settings."""

from __future__ import annotations

import dataclasses

import pytest
from treeline_runtime.args import GROUPS, ServerArgs, build_parser, parse_args
from treeline_runtime.config import ConfigError, SchedulerConfig
from treeline_wire.settings import settings_of


def test_every_setting_of_a_group_has_a_flag_with_help_and_no_other_has():
    flags = {action.dest: action for action in build_parser()._actions}
    for name, (_, words) in settings_of(ServerArgs).items():
        assert (name in flags) == (words.group is not None), name
        assert words.help
        assert words.group is None or words.group in GROUPS
        assert name not in flags or flags[name].help == words.help


def test_without_flags_the_command_line_gives_the_defaults(monkeypatch: pytest.MonkeyPatch):
    for variable in ("TREELINE_API_KEY", "TREELINE_ADMIN_KEY"):
        monkeypatch.delenv(variable, raising=False)
    assert parse_args(["--model", "m"]) == parse_args(["m"]) == ServerArgs(model="m")


def test_the_same_bounds_hold_for_flags_and_for_python(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ConfigError, match=r"mem_fraction must be above 0 and at most 1, got 1\.5"):
        ServerArgs(model="m", mem_fraction=1.5)
    with pytest.raises(SystemExit):
        parse_args(["--model", "m", "--mem-fraction=1.5"])
    assert "--mem-fraction: must be above 0 and at most 1, got 1.5" in capsys.readouterr().err


def test_the_servers_arguments_are_the_schedulers_settings():
    args = parse_args(["--model", "m", "--page-size", "4", "--schedule-policy", "lpm"])
    assert isinstance(args, SchedulerConfig)
    assert (args.page_size, args.schedule_policy, args.overlap_depth) == (4, "lpm", None)
    assert dataclasses.replace(args, model="/models/m").model == "/models/m"


def test_secrets_are_not_shown():
    shown = ServerArgs(model="m", api_key="a", admin_key="b").public()
    assert (shown["api_key"], shown["admin_key"], shown["model"]) == ("(set)", "(set)", "m")
    assert ServerArgs(model="m").public()["api_key"] is None
