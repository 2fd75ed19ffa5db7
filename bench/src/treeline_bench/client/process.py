"""Running the load client beside us, so that neither our progress display nor our garbage is in its timings."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from treeline_bench.client.messages import Plan, Report
from treeline_bench.processes import child


class ClientFailed(RuntimeError):
    """The load client could not carry out its plan; the message ends with what it said."""


def run_client(plan: Plan, folder: Path, cores: Sequence[int] | None = None) -> Report:
    """Carry out `plan` in a process pinned to `cores`; blocks until it has ended. Raises ClientFailed.

    Whatever ends the wait (Ctrl-C too) ends the process.
    """
    plan_path, report_path = folder / "plan.msgpack", folder / "report.msgpack"
    plan_path.write_bytes(msgspec.msgpack.encode(plan))
    argv = [sys.executable, "-m", "treeline_bench.client", str(plan_path), str(report_path)]
    with child("client", argv, folder, cores) as client:
        status = client.process.wait()
    if status != 0:
        raise ClientFailed(f"the load client exited with status {status}:\n{client.last_lines(40)}")
    return msgspec.msgpack.decode(report_path.read_bytes(), type=Report)
