"""A run of pytest that does not end, for `test_runs_end.py`: a server, and a process that hides from signals."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
from support.runtime_server import ServerProcess

DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"


def test_for_ever() -> None:
    server = ServerProcess(Path("models/tiny"), "--no-events", fake=True).ready()
    deaf = subprocess.Popen([sys.executable, "-c", DEAF], start_new_session=True)
    family = [server.process, *psutil.Process(server.process.pid).children(recursive=True), deaf]
    told = Path(os.environ["ENDLESS_RUN"])
    told.with_suffix(".new").write_text(" ".join(str(process.pid) for process in family))
    told.with_suffix(".new").rename(told)
    deaf.wait()
