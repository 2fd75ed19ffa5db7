"""`treeline up` as its user sees it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
from support.ports import free_base
from support.stack import until
from treeline.main import main

pytestmark = pytest.mark.integration


def command(*more: str) -> list[str]:
    """Return the command with ports for two runtimes."""
    words = [sys.executable, "-m", "treeline", "up", "--port-base", str(free_base(5 + 2 * 6))]
    return [*words, *more]


class Up:
    """A running `treeline up` and its output."""

    def __init__(self, folder: Path, *more: str) -> None:
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        self.out_path, self.err_path = folder / "out", folder / "err"
        with self.out_path.open("wb") as out, self.err_path.open("wb") as err:
            self.popen = subprocess.Popen(
                command(*more),
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "TMPDIR": str(self.temporary)},
            )

    @property
    def out(self) -> str:
        return self.out_path.read_text()

    @property
    def err(self) -> str:
        return self.err_path.read_text()

    def ready(self) -> str:
        """Wait for the ready line and return its URL."""

        def said() -> bool:
            assert self.popen.poll() is None, self.err
            return "ready: " in self.out

        until(said, "treeline up is ready", 240, lambda: self.err)
        return self.out.splitlines()[0].removeprefix("ready: ")

    def family(self) -> list[psutil.Process]:
        return [psutil.Process(self.popen.pid), *psutil.Process(self.popen.pid).children(recursive=True)]


@pytest.fixture
def up(tmp_path: Path):
    started: list[Up] = []

    def start(*more: str) -> Up:
        started.append(Up(tmp_path, *more))
        return started[-1]

    yield start
    for one in started:
        if one.popen.poll() is None:
            family = one.family()
            os.killpg(one.popen.pid, signal.SIGKILL)
            one.popen.wait(60)
            psutil.wait_procs(family, 60)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.deep)])
def test_up_serves_and_a_signal_stops_everything(up, number):
    running = up("--replicas", "1")
    url = running.ready()
    models = httpx.get(f"{url}/v1/models", trust_env=False, timeout=60).json()
    assert [model["id"] for model in models["data"]] == ["tiny"]
    assert "curl" in running.out
    assert f"in a browser: {url}/console/" in running.out
    family = running.family()
    running.popen.send_signal(number)
    assert running.popen.wait(30) == 0
    _, alive = psutil.wait_procs(family, 60)
    assert not alive


def test_running_engines_are_served_and_left_running(up, tmp_path: Path):
    """The second engine is started last: the gateway waits for it, and says so."""
    base = free_base(2)
    serve = [sys.executable, "-m", "treeline", "sim", "serve", "--events-port=0", "--replay-port=0", "--load-port=0"]
    with contextlib.ExitStack() as stack:

        def engine(port: int) -> subprocess.Popen[bytes]:
            process = stack.enter_context(subprocess.Popen([*serve, f"--port={port}"], stdin=subprocess.DEVNULL))
            stack.callback(process.terminate)
            return process

        engines = [engine(base)]
        running = up("--engine", f"a=127.0.0.1:{base}", "--engine", f"b=127.0.0.1:{base + 1}")
        until(lambda: "picker: ready" in running.err, "the picker is ready", 240, lambda: running.err)
        waits = f"engine b: not ready: http://127.0.0.1:{base + 1}: Connection refused"
        until(lambda: waits in running.err, "what the picker says of b is shown", 60, lambda: running.err)
        assert running.out == ""
        engines.append(engine(base + 1))
        url = running.ready()
        assert '"model": "tiny"' in running.out
        assert not any("treeline_runtime" in " ".join(process.cmdline()) for process in running.family())
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, trust_env=False, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-treeline-endpoint"] in {f"127.0.0.1:{base}", f"127.0.0.1:{base + 1}"}
        missing = httpx.post(f"{url}/v1/chat/completions", json={**body, "model": "x"}, trust_env=False, timeout=60)
        assert missing.json()["error"]["message"].endswith("Served: `tiny`.")
        running.popen.send_signal(signal.SIGINT)
        assert running.popen.wait(30) == 0
        assert [process.poll() for process in engines] == [None, None]


def test_a_server_without_openais_api_ends_it_with_the_pickers_reason(up):
    base = free_base(1)
    with subprocess.Popen([sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(base)]) as other:
        running = up("--engine", f"a=127.0.0.1:{base}")
        try:
            assert running.popen.wait(240) == 1
        finally:
            other.terminate()
    assert f"no request can go to engine a: http://127.0.0.1:{base} has no /v1/models" in running.err
    assert running.out == ""


@pytest.mark.deep
def test_a_runtime_that_dies_is_named_and_the_rest_is_stopped(up):
    running = up("--replicas", "2")
    running.ready()
    family = running.family()
    runtime = next(process for process in family if "treeline_runtime" in " ".join(process.cmdline()))
    runtime.kill()
    assert running.popen.wait(60) == 1
    assert "runtime-0 was ended by SIGKILL" in running.err
    _, alive = psutil.wait_procs(family, 60)
    assert not alive


@pytest.mark.deep
def test_keys_are_in_private_files_and_those_of_a_killed_run_are_removed_at_the_next_start(up, tmp_path: Path):
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "ada").write_text("sk-of-ada")
    running = up("--replicas", "1", "--api-keys", str(tmp_path / "keys"))
    url = running.ready()
    (folder,) = running.temporary.glob("treeline-up-*")
    assert [path.stat().st_mode & 0o77 for path in (folder, folder / "envoy.json")] == [0, 0]
    metrics_port = running.out.split("metrics: http://127.0.0.1:")[1].partition("/")[0]
    ours = {"headers": {"x-api-key": "sk-of-ada"}, "trust_env": False}
    assert httpx.get(f"{url}/v1/models", **ours).status_code == 200
    counted = httpx.get(f"http://127.0.0.1:{metrics_port}/metrics", trust_env=False).text
    assert 'treeline_epp_client_requests_total{client="ada"} 1.0' in counted
    family = running.family()
    running.popen.kill()
    _, alive = psutil.wait_procs(family, 30)
    assert not alive
    assert folder.exists()
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        assert up("--port", str(holder.getsockname()[1])).popen.wait(60) == 1
    assert not folder.exists()


def test_a_busy_port_is_named_before_anything_starts(tmp_path: Path):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        answer = subprocess.run(command("--port", str(taken)), capture_output=True, text=True, timeout=240)
    assert answer.returncode == 1
    assert f"port {taken}" in answer.stderr
    assert "gateway" in answer.stderr
    assert answer.stdout == ""


@pytest.mark.deep
def test_a_missing_model_is_a_clear_error(tmp_path: Path):
    answer = subprocess.run(
        command("--replicas", "1", "--model", str(tmp_path / "nowhere")),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert answer.returncode == 1
    assert "nowhere" in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize("words", [["--replicas", "0"], ["--port", "70000"], ["--polcy", "random"]])
def test_a_mistake_in_a_flag_is_named(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["up", *words])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert words[1] in said or words[0] in said
