"""A child that is stopped while it starts ends at once, and prints nothing on a terminal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from treeline_runtime.args import ServerArgs
from treeline_runtime.ipc import Addresses
from treeline_runtime.processes import ChildSpec

CHILD = """
import shutil, sys, time
from pathlib import Path
from treeline_runtime import processes

def run(spec, context):
    folder = Path(spec.addresses.folder)
    print("started", flush=True)
    {}

sys.exit(processes.run_child("detokenizer", run))
"""
LOADS = "time.sleep(600)"
FINDS_NO_FOLDER = """processes.NOTICE_S = 600
    shutil.rmtree(folder)
    (folder / "socket").touch()"""


def ended(tmp_path: Path, does: str) -> tuple[int, str]:
    """Return exit status and log of a child whose parent leaves while it starts."""
    folder = tmp_path / "sockets"
    folder.mkdir()
    spec = ChildSpec(ServerArgs(model="m"), Addresses(str(folder)), "m", 1)
    command = [sys.executable, "-c", CHILD.format(does)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as child:
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(msgspec.json.encode(spec) + b"\n")
            child.stdin.flush()
            assert child.stdout.readline() == b"started\n"
            _, log = child.communicate(timeout=240)
        finally:
            child.kill()
    assert not folder.exists()
    return child.returncode, log.decode()


@pytest.mark.parametrize("does", [LOADS, FINDS_NO_FOLDER], ids=["loads", "finds no folder"])
def test_a_child_stopped_during_its_start_ends_silently(tmp_path: Path, does: str) -> None:
    assert ended(tmp_path, does) == (0, "")
