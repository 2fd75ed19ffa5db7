"""Running the load client beside us, so that neither our progress display nor our garbage is in its timings."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from treeline_bench.client.messages import Plan, Report
from treeline_bench.processes import before_exec


class ClientFailed(RuntimeError):
    """The load client could not carry out its plan; the message ends with what it said."""


def run_client(
    plan: Plan,
    folder: Path,
    cores: Sequence[int] | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Report:
    """Carry out `plan` in a process pinned to `cores`; blocks until it has ended. Raises ClientFailed.

    Whatever ends the wait (Ctrl-C too) ends the process.
    """
    plan_path, report_path, log_path = (
        folder / "plan.msgpack",
        folder / "report.msgpack",
        folder / "client.log",
    )
    plan_path.write_bytes(msgspec.msgpack.encode(plan))
    argv = [sys.executable, "-m", "treeline_bench.client", str(plan_path), str(report_path)]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            preexec_fn=before_exec(cores),
        )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            progress(int(line))
        status = process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    if status != 0:
        said = log_path.read_text(errors="replace")[-2000:]
        raise ClientFailed(f"the load client exited with status {status}:\n{said}")
    return msgspec.msgpack.decode(report_path.read_bytes(), type=Report)
