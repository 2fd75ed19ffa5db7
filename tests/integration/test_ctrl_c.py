"""Ctrl-C while a command begins: it ends with status 130, without a traceback, and leaves nothing behind.

Where a process is when the signal comes is told by Python itself, which writes each module to standard error once it is
imported (`PYTHONPROFILEIMPORTTIME`); later moments are lines of the log.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from support.ports import free_base

pytestmark = pytest.mark.integration

TREELINE = str(Path(sys.executable).with_name("treeline"))
TINY = str(Path(__file__).parents[2] / "models" / "tiny")
SERVE = ["serve", TINY, "--port=0", "--metrics-port=off", "--admin-port=off", "--no-events", "--log-format=text"]
PICK = ["pick", "--endpoint", "a=127.0.0.1:9"]


def interrupted(words: list[str], moment: str, folder: Path, **environment: str) -> tuple[int, str]:
    """Send SIGINT as soon as a line of standard error matches. Return the status and the rest of the output."""
    env = {**os.environ, "TMPDIR": str(folder), "PYTHONPROFILEIMPORTTIME": "1", "OMP_NUM_THREADS": "1", **environment}
    process = subprocess.Popen(
        [TREELINE, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env
    )
    overdue = threading.Timer(240, process.kill)
    overdue.start()
    said: list[str] = []
    family: list[psutil.Process] = []
    try:
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line)
            if not family and re.search(moment, line):
                family = psutil.Process(process.pid).children(recursive=True)
                process.send_signal(signal.SIGINT)
        status = process.wait(60)
    finally:
        overdue.cancel()
        process.kill()
    _, alive = psutil.wait_procs(family, 60)
    assert not alive
    assert not list(folder.iterdir()), "temporary files are gone"
    text = "".join(line for line in said if not line.startswith("import time:"))
    assert any(re.search(moment, line) for line in said), f"there was no {moment!r}:\n{text}"
    return status, text


@pytest.mark.parametrize("words", [SERVE, ["up"], PICK, ["operate"], ["bench", "--list"]], ids=lambda words: words[0])
@pytest.mark.parametrize("module", ["treeline.main", "treeline_wire.settings|rich.text|httpx"])
def test_ctrl_c_while_modules_load_ends_silently(words: list[str], module: str, tmp_path: Path) -> None:
    assert interrupted(words, rf"\| +({module.replace('.', '[.]')})$", tmp_path) == (128 + signal.SIGINT, "")


@pytest.mark.parametrize("moment", ["listening on", "[|] +uvloop.loop$", "reasoning parser"])
def test_ctrl_c_while_a_model_loads_ends_the_server_with_130(moment: str, tmp_path: Path) -> None:
    status, said = interrupted(SERVE, moment, tmp_path)
    assert status == 128 + signal.SIGINT
    assert "Traceback" not in said


def test_ctrl_c_during_a_download_does_not_wait_for_its_threads(tmp_path: Path) -> None:
    """The Hub is a port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hub = f"http://127.0.0.1:{silent.getsockname()[1]}"
        words = ["serve", "org/name", *SERVE[2:]]
        home = tmp_path.parent / f"{tmp_path.name}-hub"
        status, said = interrupted(words, "looking for", tmp_path, HF_ENDPOINT=hub, HF_HOME=str(home))
    assert status == 128 + signal.SIGINT
    assert "Traceback" not in said


@pytest.mark.parametrize("moment", ["runtime-0: starting", "picker: ready"])
def test_ctrl_c_before_all_are_ready_stops_the_started_processes(moment: str, tmp_path: Path) -> None:
    status, said = interrupted(["up", "--replicas=1", "--port-base", str(free_base(5 + 6))], moment, tmp_path)
    assert status == 128 + signal.SIGINT
    assert said.endswith("stopped\n")
    assert "Traceback" not in said
