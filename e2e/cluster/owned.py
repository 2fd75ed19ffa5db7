"""Processes that we started: each is recorded before it runs, and only recorded ones are ended. A process is its pid
and its start time, so a pid that another process got meanwhile is not ours.

A process is its pid and its start time: a pid that was given to somebody else meanwhile is not ours.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.place import ClusterError, Home

# A shell that writes its pid and start time (field 22 of its stat, whose name in parentheses has no blank) and
# becomes the program: there is no moment in which the program runs and is not written down.
_LAUNCHER = 'read -r stat < /proc/$$/stat; set -- $stat "$@"; echo "$1 ${22}" > "$OWNED_RECORD"; shift 52; exec "$@"'


@dataclass(frozen=True)
class Process:
    """A process that we started."""

    pid: int
    started: int

    def alive(self) -> bool:
        """Return whether it runs: a zombie does not, and another process with that pid does not count."""
        stat = _stat(self.pid)
        return stat is not None and stat.started == self.started and stat.state not in "ZX"

    def end(self, *, patience_s: float = 10.0) -> None:
        """Kill it, and wait until it is gone."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            if not self.alive():  # looked at while the handle holds the pid to one process
                return
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        except ProcessLookupError:
            return
        finally:
            os.close(handle)
        until(lambda: not self.alive(), f"process {self.pid} to end", patience_s)


@dataclass(frozen=True)
class Stat:
    """A process's state, parent and start time, as the kernel reports them."""

    state: str
    parent: int
    started: int


def parse_stat(text: str) -> Stat:
    """Parse a line of /proc/PID/stat. The name in parentheses may hold anything."""
    fields = text[text.rindex(")") + 2 :].split()
    return Stat(fields[0], int(fields[1]), int(fields[19]))


def _stat(pid: int) -> Stat | None:
    try:
        return parse_stat(Path(f"/proc/{pid}/stat").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return None


def children(pid: int) -> list[int]:
    """Return its child processes."""
    numbers = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [n for n in numbers if (stat := _stat(n)) is not None and stat.parent == pid]


class Registry:
    """The processes of a work folder, by name."""

    def __init__(self, home: Home) -> None:
        self._home = home

    def start(
        self, name: str, command: Sequence[str], *, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a program that outlives us; its output goes to ``logs/NAME.log``."""
        with (self._home.logs / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                ["/bin/sh", "-c", _LAUNCHER, "sh", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env={**os.environ, **(environment or {}), "OWNED_RECORD": str(self._home.pids / name)},
                start_new_session=True,
            )

    def get(self, name: str) -> Process | None:
        """Return the process of that name, if it was ever started and its record is complete."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            pid, started = (self._home.pids / name).read_text().split()
            return Process(int(pid), int(started))
        return None

    def names(self) -> list[str]:
        return sorted(p.name for p in self._home.pids.iterdir()) if self._home.pids.is_dir() else []

    def alive(self, name: str) -> bool:
        process = self.get(name)
        return process is not None and process.alive()

    def ended(self, name: str) -> bool:
        """Return whether it was started and has ended. A process whose record is still being written has not."""
        process = self.get(name)  # read once: between two readings the record may come
        return process is not None and not process.alive()

    def end(self, name: str) -> None:
        """End a process and forget it; wait for those that die with it (``unshare --kill-child``)."""
        if process := self.get(name):
            with_it = [Process(pid, stat.started) for pid in children(process.pid) if (stat := _stat(pid))]
            process.end()
            until(lambda: not any(child.alive() for child in with_it), f"what {name} started to end")
        (self._home.pids / name).unlink(missing_ok=True)

    def log(self, name: str, lines: int = 15) -> str:
        """Return the end of a program's log."""
        path = self._home.logs / f"{name}.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""


def until(condition: Callable[[], bool], what: str, patience_s: float = 60.0, *, every_s: float = 0.05) -> None:
    """Wait for a condition. Raises ClusterError if it does not come true in time."""
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            raise ClusterError(f"waited {patience_s:g} s for {what}")
        time.sleep(every_s)
