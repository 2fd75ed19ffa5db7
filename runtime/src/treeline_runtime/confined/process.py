"""The parent's side of a confined process."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Self

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

    def __init__(self, module: str, limits: ProcessLimits, *arguments: str) -> None:
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
            if self._ask(msgspec.msgpack.encode(limits), _START_SECONDS) != READY:
                raise OSError("the process did not start")
        except (Killed, ProcessLookupError) as error:
            self.end()
            raise OSError("the process did not start") from error

    def alive(self) -> bool:
        """It has not ended by itself."""
        return self._process.poll() is None

    def ask(self, request: bytes, *, late_s: float = 0.0, on_late: Callable[[], None] | None = None) -> bytearray:
        """Send a request and wait for its answer. Raises `Killed` when none comes in time.

        on_late: called where none has come after `late_s`; if it raises, nothing may be asked any more."""
        return self._ask(request, self._seconds, late_s, on_late)

    def _ask(
        self, request: bytes, seconds: float, late_s: float = 0.0, on_late: Callable[[], None] | None = None
    ) -> bytearray:
        deadline = time.monotonic() + seconds
        try:
            self._socket.settimeout(seconds)
            send_frame(self._socket, request)
            if on_late is not None and not self._answers_within(late_s):
                on_late()
            reply = read_frame(self._socket, deadline)
        except OSError as error:
            raise self._why(type(error).__name__) from error
        if reply is None:
            raise self._why("it died")
        return reply

    def _answers_within(self, seconds: float) -> bool:
        self._socket.settimeout(seconds)
        with contextlib.suppress(TimeoutError):
            self._socket.recv(1, socket.MSG_PEEK)
            return True
        return False

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
        """Kill it and close the socket. For the thread that owns it. Leaving a `with` does it, too."""
        self.kill()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
