"""The parent's side of a confined process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import msgspec

from treeline_runtime.confined.child import READY, ProcessLimits
from treeline_runtime.confined.frames import read_frame, send_frame

_START_SECONDS = 30.0
_GRACE_SECONDS = 0.5
"""The process ends itself at its deadline; this much later we do."""


class Killed(Exception):
    """The request passed a limit, and its process has ended or is to be ended."""


class Vanished(Killed):
    """Somebody else has killed the process, a person or a kernel without memory; the request may be innocent."""


class ConfinedProcess:
    """One process and our end of its socket. One thread asks at a time."""

    def __init__(self, module: str, limits: ProcessLimits, *arguments: str, niceness: int = 0) -> None:
        """module: what runs, by `child.serve`; arguments: of its command line. Raises OSError when it cannot be
        started."""
        self._seconds = limits.seconds + _GRACE_SECONDS
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-m", module, *arguments],
                    env={},
                    cwd="/",
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            except BaseException:
                ours.close()
                raise
        self._socket = ours
        self.pid = self._process.pid
        try:
            if niceness:
                os.setpriority(os.PRIO_PROCESS, self.pid, niceness)
            if self._ask(msgspec.msgpack.encode(limits), _START_SECONDS) != READY:
                raise OSError("the process did not start")
        except (Killed, ProcessLookupError) as error:
            self.end()
            raise OSError("the process did not start") from error

    def alive(self) -> bool:
        """It has not ended by itself."""
        return self._process.poll() is None

    def ask(self, request: bytes) -> bytearray:
        """Send a request and wait for its answer. Raises `Killed` when none comes in time."""
        return self._ask(request, self._seconds)

    def _ask(self, request: bytes, seconds: float) -> bytearray:
        deadline = time.monotonic() + seconds
        try:
            self._socket.settimeout(seconds)
            send_frame(self._socket, request)
            reply = read_frame(self._socket, deadline)
        except OSError as error:
            raise self._why(type(error).__name__) from error
        if reply is None:
            raise self._why("it died")
        return reply

    def _why(self, seen: str) -> Killed:
        """Limits end a process by other signals than SIGKILL, or leave that to us."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_SECONDS)
        return Vanished(seen) if self._process.returncode == -signal.SIGKILL else Killed(seen)

    def kill(self) -> None:
        """End the process, which may be in the middle of anything, and wait for it."""
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Kill it and close the socket. For the thread that owns it."""
        self.kill()
        self._socket.close()
