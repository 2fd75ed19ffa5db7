"""The parent's side of a confined process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from treeline_runtime.confined.child import READY, ProcessLimits, read_frame, send_frame

_START_SECONDS = 30.0
_GRACE_SECONDS = 0.5
"""The process should end itself at its deadline; after this much longer the parent kills it."""


class Killed(Exception):
    """The request exceeded a limit; its process has ended or must be ended."""


class Late(Killed):
    """No answer in time. The process may still be working."""


class Vanished(Killed):
    """The process was killed from outside, by a person or for lack of memory; the request may be harmless."""


class ConfinedProcess:
    """A process and our end of its socket. One thread uses it at a time."""

    def __init__(
        self, module: str, limits: ProcessLimits, *, logs: bool = False, arguments: Sequence[str] = ()
    ) -> None:
        """module: runs by `child.serve`, with these arguments; logs: its output goes to standard error. Returns at
        once, see `wait_ready`. Raises OSError if it cannot be started."""
        self._limits = limits
        self._socket, theirs = socket.socketpair()
        # Ctrl-C reaches the whole terminal group, but only the parent decides
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-m", module, *arguments],
                env={},
                cwd="/",
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=None if logs else subprocess.DEVNULL,
            )
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.pid = self._process.pid

    def wait_ready(self, seconds: float = _START_SECONDS) -> None:
        """Waits until it is ready. Raises OSError if that takes longer than this."""
        try:
            if self.ask(msgspec.msgpack.encode(self._limits), seconds=seconds) == READY:
                return
        except (Killed, ProcessLookupError) as error:
            raise OSError("the process did not start") from error
        raise OSError("the process did not start")

    def fileno(self) -> int:
        """The socket's descriptor: without a running request it is readable only when the process has ended."""
        return self._socket.fileno()

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(
        self,
        *request: bytes,
        seconds: float | None = None,
        late_s: float = 0.0,
        on_late: Callable[[], None] | None = None,
    ) -> bytearray:
        """Sends a request's parts and waits for the answer. Raises `Killed` if none comes in time.

        seconds: for this request; None: the process's limit. on_late: called if there is no answer after `late_s`; if
        it raises, the process cannot be used any more."""
        if seconds is None:
            seconds = self._limits.seconds + _GRACE_SECONDS
        deadline = time.monotonic() + seconds
        try:
            self._socket.settimeout(seconds)
            send_frame(self._socket, *request)
            if on_late is not None and not self._answers_within(late_s):
                on_late()
            reply = read_frame(self._socket, deadline)
        except TimeoutError as error:
            raise Late("no answer came in time") from error
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
        """Why it ended: limits use other signals than SIGKILL, or leave that to the parent."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_SECONDS)
        return Vanished(seen) if self._process.returncode == -signal.SIGKILL else Killed(seen)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        self.kill()
        self._socket.close()
