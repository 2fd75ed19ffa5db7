"""The picker's process: flags, start, signals, exit."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.epp_io import running_picker
from support.http import client
from support.ports import free_ports
from treeline_epp.command import main
from treeline_epp.main import StartError


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert "--endpoint NAME=HOST:PORT" in text
    assert "Example:" in text


@pytest.mark.parametrize("flag", ["--grpc-port", "--grpc-health-port", "--metrics-port", "--admin-port"])
async def test_a_busy_port_is_an_error_that_names_it(
    flag: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another port with {flag}$"
        with caplog.at_level("INFO"), pytest.raises(StartError, match=told):
            async with running_picker("--endpoint", "a=127.0.0.1:1", flag, str(port)):
                pass
    assert capfd.readouterr().err == "", "nothing of gRPC's own"
    assert "stopping" not in caplog.text, "it had not begun"


@pytest.mark.parametrize("host", ["192.0.2.1", "a..b"])
async def test_a_host_that_is_not_ours_is_an_error_that_names_its_flag(host: str) -> None:
    with pytest.raises(StartError, match=rf"cannot listen on {host}:.*; correct --host$"):
        async with running_picker("--endpoint", "a=127.0.0.1:1", "--host", host):
            pass


@pytest.mark.parametrize("flag", ["--endpoints-file", "--tokenizer", "--curve-dir"])
async def test_a_wrong_path_is_an_error_that_names_it(flag: str, tmp_path: Path) -> None:
    with pytest.raises(StartError, match=rf"^{flag}.*nothing"):
        async with running_picker("--endpoint", "a=127.0.0.1:1", flag, str(tmp_path / "nothing")):
            pass


async def test_the_debug_pages_exist_only_if_enabled() -> None:
    async with running_picker("--endpoint", "a=127.0.0.1:1") as picker:
        assert (await picker.get("/live")).json() == {"live": True}
        assert (await picker.get("/debug/tree?pod=nobody")).status_code == 404
        assert (await picker.metrics())["treeline_epp_extproc_ready"] == 1
    async with running_picker("--endpoint", "a=127.0.0.1:1", debug=False) as picker:
        assert (await picker.get("/debug/tree")).status_code == 404
        assert (await picker.get("/debug/endpoints")).status_code == 404


@pytest.mark.parametrize(
    "path", ["/", "/ready", "/live", "/endpoints", "/debug/endpoints", "/debug/tree", "/metrics/../endpoints"]
)
async def test_the_metrics_port_shows_metrics_and_nothing_else(path: str) -> None:
    async with running_picker("--endpoint", "a=127.0.0.1:1") as picker, client() as http:
        base = f"http://127.0.0.1:{picker.options.metrics_port}"
        assert (await http.get(base + path)).status_code == 404
        assert (await http.post(f"{base}/metrics")).status_code == 405
        assert (await picker.get("/metrics")).status_code == 404, "and the admin port shows none"


@pytest.mark.parametrize(
    "headers",
    [{"host": "evil.example"}, {"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}],
)
async def test_the_debug_pages_are_for_clients_on_this_machine_alone(headers: dict[str, str]) -> None:
    async with running_picker("--endpoint", "a=127.0.0.1:1", "--host", "0.0.0.0") as picker, client() as http:
        base = f"http://127.0.0.1:{picker.options.admin_port}"
        for path in ("/debug/endpoints", "/debug/tree"):
            refused = await http.get(base + path, headers=headers)
            assert refused.status_code == 403
            assert "only for clients on this machine" in refused.json()["error"]
            assert (await picker.get(path)).status_code == 200
        assert (await http.get(f"{base}/ready", headers=headers)).status_code == 200, "as the kubelet asks"


def test_sigterm_ends_the_process_with_status_0_and_json_lines(tmp_path: Path) -> None:
    grpc_port, eds_port, metrics_port, admin_port = free_ports(4)
    words = [
        sys.executable,
        "-m",
        "treeline_epp",
        "--endpoint",
        "a=127.0.0.1:1",
        "--grpc-port",
        str(grpc_port),
    ]
    words += ["--grpc-health-port", str(eds_port), "--metrics-port", str(metrics_port)]
    words += ["--admin-port", str(admin_port)]
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(words, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + 60
        while b"ready after" not in log.read_bytes():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert lines[-1]["message"] == "stopping"
    assert {"time", "level", "logger"} <= lines[0].keys()
