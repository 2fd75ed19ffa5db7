"""The start: an error in the command line is reported in one line, before anything slow happens."""

from __future__ import annotations

import ipaddress
import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import zmq
from support.runtime_server import ServerProcess, running
from treeline_runtime import scheduler_process
from treeline_runtime.args import ServerArgs, build_parser, parse_args
from treeline_runtime.command import main
from treeline_runtime.download import ModelNotFound, resolve_model
from treeline_runtime.ipc import Addresses
from treeline_runtime.listeners import EventsError, ListenError, open_keys
from treeline_runtime.processes import ChildSpec, StartError
from treeline_runtime.serve import serve
from treeline_wire.security import CurveKeys

pytestmark = pytest.mark.integration

OWN_PORTS = ("--port=0", "--metrics-port=0", "--admin-port=0")


def run(*flags: str, environment: dict[str, str] | None = None) -> tuple[int, str]:
    """Run `treeline serve` until it ends. Return its status and standard error."""
    command = [sys.executable, "-m", "treeline_runtime", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert not done.stdout
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ([], "which model?"),
        (["m", "--prot", "1"], "unrecognized arguments: --prot 1; did you mean --port?"),
        (["m", "--model", "n"], "MODEL is given twice, as 'm' and as --model 'n': leave one out"),
        (["--model", "m", "--port", "http"], "--port: expected a whole number, got 'http'"),
        (["--model", "m", "--port", "70000"], "--port: must be at least 0 and at most 65535"),
        (["--model", "m", "--dtype", "int3"], "--dtype"),
        (["--model", "m", "--drain-timeout", "-1"], "--drain-timeout"),
        (["--model", "m", "--drain-timeout", "soon"], "--drain-timeout: expected seconds"),
        (["--model", "m", "--mem-fraction", "1.5"], "--mem-fraction"),
        (["--model", "m", "--max-bytes-in-flight", "1"], "--max-bytes-in-flight: must be at least 1048576"),
        (["--model", "m", "--schedule-policy", "dfs-weight"], "invalid choice: 'dfs-weight' (choose from"),
        (["--model", "m", "--eviction-policy", "slru"], "invalid choice: 'slru' (choose from"),
        (["--model", "m", "--api-key", ""], "--api-key"),
        (["--model", "m", "--admin-port", "none"], "--admin-port: expected a whole number, got 'none'"),
        (
            ["--model", "m", "--prefix-cache", "nosuch"],
            "--prefix-cache: invalid choice: 'nosuch' (choose from 'radix', 'off')",
        ),
    ],
)
def test_a_wrong_argument_is_named_with_usage_and_a_hint_to_help(
    flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 2
    shown = capsys.readouterr()
    usage, error, help_ = shown.err.splitlines()
    assert usage.startswith("usage: ")
    assert named in error
    assert help_.startswith("Try ")
    assert shown.out == ""


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for word in ("examples:", "curl", "--pre-stop", "SIGTERM", "Exit status", "8000", "TREELINE_ADMIN_KEY"):
        assert word in shown


def test_help_fits_two_screens_and_help_all_lists_the_rest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["--help"]) == 0
    short = capsys.readouterr().out
    assert len(short.splitlines()) <= 100
    assert "--help-all" in short
    assert main(["--help-all"]) == 0
    whole = capsys.readouterr().out
    page = (Path(__file__).parents[3] / "docs" / "serve.md").read_text()
    for action in build_parser()._actions:
        for flag in action.option_strings:
            if flag not in ("-h", "--help", "--help-all"):
                assert f"{flag} " in whole or f"{flag}\n" in whole, flag
                assert f"`{flag}`" in page, flag
    assert parse_args(["--model", "m", "--page-size", "8"]).page_size == 8, "a rare flag is taken all the same"


def test_the_topic_of_events_is_short_and_printable(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_args(["--model", "m"]).kv_events_topic == ""
    assert parse_args(["--model", "m", "--kv-events-topic", "kv@pod-1@m"]).kv_events_topic == "kv@pod-1@m"
    for topic in ("a\nb", "x" * 257):
        with pytest.raises(SystemExit):
            parse_args(["--model", "m", "--kv-events-topic", topic])
        assert "printable" in capsys.readouterr().err


def test_the_api_key_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_args(["--model", "m"]).api_key is None
    assert parse_args(["--model", "m", "--api-key", "secret"]).public()["api_key"] == "(set)"
    monkeypatch.setenv("TREELINE_API_KEY", "other")
    assert parse_args(["--model", "m"]).api_key == "other"


def test_the_admin_key_comes_from_the_environment_and_is_never_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse_args(["--model", "m"]).admin_key is None
    monkeypatch.setenv("TREELINE_ADMIN_KEY", "from-environment")
    args = parse_args(["--model", "m"])
    assert (args.admin_key, args.public()["admin_key"]) == ("from-environment", "(set)")
    monkeypatch.setenv("TREELINE_ADMIN_KEY", "two words")
    assert main(["--model", "m"]) == 2
    assert "TREELINE_ADMIN_KEY: a key is one word" in capsys.readouterr().err


def test_an_error_is_one_line_and_status_1() -> None:
    status, log = run("--model", "/nowhere/at/all", *OWN_PORTS, "--no-events")
    assert status == 1
    assert "treeline serve: error: --model: there is no folder '/nowhere/at/all'" in log.splitlines()[-1]


def test_with_json_each_line_of_the_log_is_a_json_object(model: Path) -> None:
    """It holds for all processes of a server, from its first line to its last."""
    with (
        running(model, "--log-format=json", "--log-level=debug", environment={"PYTHONWARNINGS": "always"}) as server,
        server.client() as http,
    ):
        assert http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2}).status_code == 200
    assert server.log.pop() == "(end of log)"
    lines = [json.loads(line) for line in server.log]
    assert {"http", "scheduler"} <= {line["process"] for line in lines}
    assert all(line["time"].endswith("+00:00") and line["level"] and line["message"] for line in lines)
    status, log = run("/nowhere/at/all", *OWN_PORTS, "--no-events")
    assert status == 1
    assert "there is no folder" in [json.loads(line)["message"] for line in log.splitlines()][-1]


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"has no config\.json"):
        resolve_model(str(tmp_path))
    shutil.copytree(model, tmp_path / "weightless", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(ModelNotFound, match=r"has no \*\.safetensors weights"):
        resolve_model(str(tmp_path / "weightless"))
    assert resolve_model(str(tmp_path / "weightless"), needs_weights=False) == tmp_path / "weightless"
    with pytest.raises(ModelNotFound, match="is a file"):
        resolve_model(str(model / "config.json"))


def test_a_hub_id_without_a_network_is_a_clear_error(tmp_path: Path) -> None:
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    status, log = run("--model", "org/name", *OWN_PORTS, "--no-events", environment=environment)
    assert status == 1
    assert "org/name is not a folder here, is not downloaded yet, and the Hub cannot be reached" in log


PORT_FLAGS = ("--port", "--metrics-port", "--admin-port", "--events-port", "--replay-port", "--load-port")


@pytest.mark.parametrize("flag", PORT_FLAGS)
def test_a_busy_port_is_named_before_the_model_is_read(flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = [f"{name}={port if name == flag else 0}" for name in PORT_FLAGS]
        with pytest.raises((ListenError, EventsError), match=rf"^{flag}: cannot .*:{port}: Address already in use"):
            serve(parse_args(["--model", "/nowhere", *flags]))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", socket.gethostname()])
def test_administration_is_not_opened_to_the_network_without_a_key(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--model", "/nowhere", *OWN_PORTS, "--no-events", "--admin-host", host]
    if not ipaddress.ip_address(socket.getaddrinfo(host, None)[0][4][0]).is_loopback:
        with pytest.raises(ListenError, match=r"^--admin-host: refusing .* without a key: .*TREELINE_ADMIN_KEY"):
            serve(parse_args(flags))
    monkeypatch.setenv("TREELINE_ADMIN_KEY", "k")
    with pytest.raises(ModelNotFound):  # all ports are open by then
        serve(parse_args(flags))


@pytest.mark.parametrize("flag", ["--host", "--metrics-host", "--admin-host"])
def test_a_host_that_is_no_address_is_named(flag: str) -> None:
    with pytest.raises(ListenError, match=f"^{flag}: 'no such host' is no address"):
        serve(parse_args(["--model", "/nowhere", *OWN_PORTS, "--no-events", flag, "no such host"]))


def test_events_are_not_opened_to_the_network_without_keys(tmp_path: Path) -> None:
    assert open_keys(parse_args(["--model", "/nowhere", "--host", "0.0.0.0"])) == (None, "127.0.0.1")
    with pytest.raises(EventsError, match="--curve-dir: cannot read"):
        serve(parse_args(["--model", "/nowhere", *OWN_PORTS, "--curve-dir", str(tmp_path)]))
    keys = CurveKeys.generate(tmp_path / "keys")
    asked = ["--model", "/nowhere", "--host", "0.0.0.0", "--curve-dir", str(tmp_path / "keys")]
    assert open_keys(parse_args(asked)) == (keys, "0.0.0.0")


@pytest.mark.parametrize("twice", [("--events-port", "--replay-port"), ("--replay-port", "--load-port")])
def test_two_sockets_of_events_cannot_have_one_port(twice: tuple[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    flags = ["--model", "/nowhere", *OWN_PORTS, *(word for flag in twice for word in (flag, port))]
    with pytest.raises(EventsError, match=f"^{twice[1]}: {port} is already the port of {twice[0]}"):
        serve(parse_args(flags))


def test_nothing_is_ready_while_loading_and_load_failures_are_reported(model: Path, tmp_path: Path) -> None:
    go_on = tmp_path / "go on"
    environment = {"FAKE_SCHEDULER_WAITS_FOR": str(go_on), "FAKE_SCHEDULER_FAILS": "1"}
    server = ServerProcess(model, "--no-events", fake=True, environment=environment)
    with server.client() as client:
        assert client.get("/live").status_code == 200
        for path in ("/health", "/ready"):
            answer = client.get(path)
            assert answer.status_code == 503
            assert "loading" in answer.json()["error"]["message"]
        refused = client.post("/v1/completions", json={"prompt": "hi"})
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        assert client.get("/v1/models").status_code == 200
    go_on.touch()
    assert server.wait(60) == 1
    assert any("the scheduler process failed: the weights are missing" in line for line in server.log)
    assert "Traceback" not in "\n".join(server.log)


@pytest.mark.parametrize(
    ("old", "new", "args", "named"),
    [
        ("Qwen3ForCausalLM", "OddForCausalLM", {}, "OddForCausalLM"),
        ("", "", {"context_length": 1 << 20}, "context_length"),
        ("", "", {"device": "abacus"}, "abacus"),
    ],
)
def test_a_scheduler_that_cannot_start_says_what_to_change(
    model: Path, tmp_path: Path, old: str, new: str, args: dict[str, Any], named: str
) -> None:
    odd = tmp_path / "odd"
    shutil.copytree(model, odd)
    config = (odd / "config.json").read_text()
    (odd / "config.json").write_text(config.replace(old, new) if old else config)
    spec = ChildSpec(ServerArgs(model=str(odd), **args), Addresses(str(tmp_path)), str(odd), 1)
    with zmq.Context() as context, pytest.raises(StartError, match=named):
        scheduler_process.run(spec, context)
