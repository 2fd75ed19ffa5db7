"""Kills the processes that tests started when their run of pytest ends, however it ends.

Each run adds a mark of its own to the environment, which its processes inherit, also in sessions of their own, and
theirs in turn. At its end, and by another process when it was killed, whatever has the mark is killed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import uuid
from pathlib import Path

VARIABLE = "PYTEST_RUNS"
"""The marks of this run and of those around it."""


def watch_this_run() -> str:
    """Mark this process's future children, and end them with it. Return the mark."""
    mark = uuid.uuid4().hex
    os.environ[VARIABLE] = f"{os.environ.get(VARIABLE, '')} {mark}"
    words = [sys.executable, "-S", __file__, str(os.getpid()), mark]
    # In a session of its own, since a Ctrl-C reaches a whole terminal.
    os.posix_spawn(sys.executable, words, os.environ, setsid=True)
    return mark


def marked(mark: str) -> list[int]:
    """Return the processes that were started with the mark, without this one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # of another user, or gone
            if mark.encode() in (folder / "environ").read_bytes() and int(folder.name) != os.getpid():
                found.append(int(folder.name))
    return found


def reap(mark: str) -> None:
    """Kill all processes with the mark, and those that they start meanwhile."""
    while left := [pid for pid in marked(mark) if not _watches(pid)]:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _watches(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return __file__.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def main() -> None:
    pid, mark = int(sys.argv[1]), sys.argv[2]
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(pid)], [], [])
    reap(mark)


if __name__ == "__main__":
    main()
