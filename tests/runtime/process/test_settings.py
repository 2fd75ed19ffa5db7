"""The command line of the runtime is made from its settings."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from treeline_runtime import scheduler_process
from treeline_runtime.args import GROUPS, ServerArgs, build_parser, parse_args
from treeline_runtime.config import ConfigError, EngineConfig, SchedulerConfig
from treeline_runtime.ipc import Addresses
from treeline_runtime.processes import ChildSpec
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


def test_adapters_are_named_in_either_spelling_several_at_once(capsys: pytest.CaptureFixture[str]):
    assert parse_args(["m"]).lora_modules == ()
    assert not parse_args(["m"]).serves_adapters
    for flag in ("--lora-modules", "--lora-paths"):
        assert parse_args(["m", flag, "a=/x", "b=y=z", flag, "c=."]).lora_modules == ("a=/x", "b=y=z", "c=.")
    for wrong in ("a", "=path", "a=", "x" * 300 + "=p", "a\n=p"):
        with pytest.raises(SystemExit):
            parse_args(["m", "--lora-modules", wrong])
        assert "expected NAME=PATH" in capsys.readouterr().err


def test_secrets_are_not_shown():
    shown = ServerArgs(model="m", api_key="a", admin_key="b").public()
    assert (shown["api_key"], shown["admin_key"], shown["model"]) == ("(set)", "(set)", "m")
    assert ServerArgs(model="m").public()["api_key"] is None


@pytest.mark.parametrize(
    ("sizes", "use"),
    [({"dp_size": 4, "ep_size": 2}, 4), ({"tp_size": 2, "dp_size": 2, "ep_size": 4}, 2), ({"ep_size": 2}, 1)],
)
def test_experts_are_divided_over_all_ranks_that_could_share_them(sizes: dict[str, int], use: int):
    with pytest.raises(ConfigError, match=f"use --ep-size {use}, of"):
        ServerArgs(model="m", **sizes)  # type: ignore[arg-type]
    right = ServerArgs(model="m", **sizes | {"ep_size": use})  # type: ignore[arg-type]
    assert right.shares_experts is ("tp_size" not in sizes and use > 1)


def of_ranks(**settings: object) -> list[ServerArgs]:
    """Return the settings of every rank's scheduler."""
    args = dataclasses.replace(ServerArgs(model="m"), **settings)  # type: ignore[arg-type]
    specs = [ChildSpec(args, Addresses("/sockets", rank), "/models/m", 1) for rank in range(args.dp_size)]
    return [scheduler_process.config_of(spec) for spec in specs]


def test_ranks_share_the_gpus_or_the_threads_of_the_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert [(one.device, one.threads, one.model) for one in of_ranks(dp_size=1)] == [("auto", None, "/models/m")]
    assert [one.threads for one in of_ranks(dp_size=3, device="cpu")] == [2, 2, 2]
    assert [one.threads for one in of_ranks(dp_size=2, device="cpu", threads=1)] == [1, 1]
    assert [one.threads for one in of_ranks(dp_size=2, tp_size=2, device="cpu")] == [2, 2], "for each of its two"
    assert {one.threads for one in of_ranks(dp_size=9, device="cpu")} == {1}
    assert [one.mem_fraction for one in of_ranks(dp_size=2, device="cpu", mem_fraction=0.5)] == [0.25, 0.25]
    monkeypatch.setattr(scheduler_process, "resolve_device", lambda name: torch.device(name.replace("auto", "cuda")))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert [one.device for one in of_ranks(dp_size=3)] == ["cuda:0", "cuda:1", "cuda:2"]
    assert [one.device for one in of_ranks(dp_size=2, tp_size=2, device="cuda:4")] == ["cuda:4", "cuda:6"]
    with pytest.raises(ConfigError, match=r"--dp-size 5 needs 10 GPUs, 2 for each engine, cuda:0 to cuda:9, .* 8"):
        of_ranks(dp_size=5, tp_size=2)
    assert [one.device for one in of_ranks(dp_size=2, tp_size=2, pp_size=2)] == ["cuda:0", "cuda:4"]


@pytest.mark.parametrize(("tp_size", "ep_size"), [(1, 2), (4, 2), (2, 4)])
def test_experts_are_divided_over_all_ranks_or_sliced(tp_size: int, ep_size: int) -> None:
    with pytest.raises(ConfigError, match=f"use --ep-size {tp_size}, of"):
        EngineConfig(model="m", tp_size=tp_size, ep_size=ep_size)
