"""Processes that tests start end with the run of pytest, however it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.stack import until


@pytest.mark.integration
@pytest.mark.deep
@pytest.mark.deep
@pytest.mark.parametrize("workers", ["0", "1"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_processes_of_a_run_end_with_it(number: signal.Signals, workers: str, tmp_path: Path) -> None:
    told = tmp_path / "pids"
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        workers,
        "-p",
        "no:cacheprovider",
        "tests/house/endless_run.py",
    ]
    with (tmp_path / "log").open("wb") as log:
        run = subprocess.Popen(words, stdout=log, stderr=log, env=os.environ | {"ENDLESS_RUN": str(told)})
    until(told.exists, "the server is ready", 240, (tmp_path / "log").read_text)
    family = [psutil.Process(int(pid)) for pid in told.read_text().split()]
    assert len(family) >= 4, "the server with its children, and the process that hides"
    run.send_signal(number)
    run.wait(60)
    alive = psutil.wait_procs(family, 60)[1]
    assert not alive, (tmp_path / "log").read_text()
