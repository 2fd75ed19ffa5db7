"""Other rooms as processes: started, waited for, measured, and always stopped.

A child has its own session, so that Ctrl-C reaches only us and we stop children in order; on Linux the kernel ends it
with us. Its output goes to a log file, whose last lines are quoted on failure.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

STOP_S = 15.0
POLL_S = 0.02


class ChildFailed(RuntimeError):
    """A process ended, or did not become ready in time. The message quotes its log."""


class Child:
    """A process. Use `child()`; stopping twice is harmless."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        folder: Path,
        cores: Sequence[int] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.log_path = folder / f"{name}.log"
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=before_exec(cores),
                env={**os.environ, **(environment or {})},
            )

    def check(self) -> None:
        """Raises ChildFailed if the process has ended."""
        if (status := self.process.poll()) is not None:
            raise ChildFailed(f"{self.name} exited with status {status}; its last lines:\n{self.last_lines()}")

    def last_lines(self) -> str:
        with contextlib.suppress(OSError):
            lines = self.log_path.read_text(errors="replace").splitlines()[-15:]
            return "\n".join(f"  | {line}" for line in lines)
        return ""

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Polls `condition` until it holds. Raises ChildFailed if the process ends first or time is up."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            self.check()
            if time.monotonic() > deadline:
                raise ChildFailed(f"{self.name}: {what} took over {timeout_s:g} s:\n{self.last_lines()}")
            time.sleep(POLL_S)

    def wait_ready(self, url: str, timeout_s: float = 60.0) -> None:
        """Waits for a 200 from `url`. Raises ChildFailed."""
        self.wait_until(lambda: answers(url), "becoming ready", timeout_s)

    def cpu_seconds(self) -> float:
        """User + system time of the process and its living descendants, in seconds (resolution 10 ms)."""
        root = psutil.Process(self.process.pid)
        total = 0.0
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def stop(self) -> None:
        """Asks it to end, and after `STOP_S` kills its whole group."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_S)
        # Processes that it left behind in its session are killed too, also when it ended by itself.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def child(
    name: str,
    argv: Sequence[str],
    folder: Path,
    cores: Sequence[int] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Child]:
    """Starts a process, pinned to `cores` where possible, with `environment` added to ours; stopped at the end, also on
    Ctrl-C."""
    started = Child(name, argv, folder, cores, environment)
    try:
        yield started
    finally:
        started.stop()


def before_exec(cores: Sequence[int] | None = None, ending: int = signal.SIGTERM) -> Callable[[], None]:
    """Runs in the child between fork and exec (Linux): it gets the signal `ending` when the thread that started it
    ends, and runs on `cores` only."""

    def prepare() -> None:
        if sys.platform == "linux":
            pr_set_pdeathsig = 1
            ctypes.CDLL(None).prctl(pr_set_pdeathsig, ending)
            if cores is not None:
                os.sched_setaffinity(0, cores)

    return prepare


def answers(url: str) -> bool:
    """Whether a GET of `url` gives 200."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=1.0) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def free_ports(count: int, run: int = 1, addresses: Sequence[str] = ("127.0.0.1",)) -> list[int]:
    """`count` ports, each the first of `run` neighbours that are free on each of `addresses`.

    Avoids the kernel's ephemeral range, from which a client's connection could take a port before it is bound. No two
    calls return the same. Raises OSError if there is no such place left.
    """
    found: list[int] = []
    for _ in range(_PORTS):
        if len(found) == count:
            return found
        first = next(_first_ports)
        for _ in range(run - 1):
            next(_first_ports)
        places = [(address, first + offset) for address in addresses for offset in range(run)]
        if first + run <= 20_000 + _PORTS and all(_is_free(*place) for place in places):
            found.append(first)
    raise OSError("no free ports below the ephemeral range")


_PORTS = 12_000
_first_ports = (20_000 + place % _PORTS for place in itertools.count(os.getpid() * 97))


def _is_free(address: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
        return True
