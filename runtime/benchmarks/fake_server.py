"""A runtime whose scheduler has no model, as a process to be measured from outside: its port and its processor time."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
STOP_S = 120.0


@contextlib.contextmanager
def serving(
    model: Path,
    *flags: str,
    module: str = "support.fake_serve",
    environment: Mapping[str, str] | None = None,
) -> Iterator[tuple[int, int]]:
    """(process id, port) of a server that is ready. `module` serves; it is one of the tests'."""
    said = ["--model", str(model), "--served-model-name", "m", "--no-events", *flags]
    ports = ["--port=0", "--metrics-port=off", "--admin-port=off"]
    path = f"{ROOT / 'tests'}:{os.environ.get('PYTHONPATH', '')}"
    process = subprocess.Popen(
        [sys.executable, "-m", module, *said, *ports],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **(environment or {})},
    )
    assert process.stderr is not None
    try:
        port = 0
        for line in process.stderr:
            if found := re.search(r"listening on http://127\.0\.0\.1:(\d+)", line):
                port = int(found[1])
            if "ready after" in line:
                break
        else:
            raise SystemExit(f"{module} did not start")
        yield process.pid, port
    finally:
        process.terminate()
        process.communicate(timeout=STOP_S)


def cpu_s(pid: int) -> float:
    """Processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
