"""Processes of ranks that start at once: they are forked from one that has imported torch, which takes seconds."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing import connection, forkserver, get_context
from typing import Final

import psutil
from treeline_runtime.scheduler.ranks import process

CONTEXT: Final = get_context("forkserver")
CONTEXT.set_forkserver_preload(["treeline_runtime.engine", process.__name__])
STARTED: Final[set[int]] = set()
"""The processes that have been forked."""


class Forked:
    """What rank 0 needs of a `subprocess.Popen`."""

    def __init__(self, module: str, channel: socket.socket) -> None:
        """As `treeline_runtime.processes.spawn`."""
        assert module == process.__name__
        self._process = CONTEXT.Process(target=_run, args=(channel, os.getcwd(), dict(os.environ)))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self._lock = threading.Lock()
        STARTED.add(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        if not connection.wait([self._process.sentinel], timeout):
            raise subprocess.TimeoutExpired(process.__name__, timeout or 0.0)
        with self._lock:  # its status can be read once
            self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def prepare() -> None:
    """Start the process from which ranks are forked, where temporary files stay."""
    forkserver.ensure_running()


def _run(channel: socket.socket, folder: str, environment: dict[str, str]) -> None:
    """Be a rank's process, as if it had been started in that folder and environment."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    for descriptor in (0, 1):
        os.dup2(channel.fileno(), descriptor)
    channel.close()
    sys.stdin = os.fdopen(0, closefd=False)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    os._exit(process.main())


def processes() -> list[psutil.Process]:
    """Those of ranks, forked or not, that this process has started."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if child.pid in STARTED or "treeline_runtime.scheduler.ranks.process" in child.cmdline():
                found.append(child)
        except psutil.Error:
            pass
    return found
