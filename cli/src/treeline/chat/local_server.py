"""A server of our own for one chat: started, waited for, and ended with it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import httpx
from rich.console import Console
from rich.text import Text

from treeline.chat.answer import brief
from treeline.chat.client import ChatError
from treeline.main import how_to_install, missing_parts
from treeline.printable import printable
from treeline.up.supervisor import die_with_parent

LOOPBACK = "127.0.0.1"
POLL_S = 0.1
STOP_S = 8.0
"""Seconds in which the server may end by itself; then its process group is killed."""
LAST_LINES = 8


class LocalServer:
    """`treeline serve` of a model, as a context manager: ready when entered, ended when left. Its log is a file, which
    stays if the server failed.
    """

    def __init__(self, model: str, arguments: Sequence[str], console: Console) -> None:
        """arguments: more arguments for `treeline serve`."""
        self._model = model
        self._arguments = arguments
        self._console = console
        self._process: subprocess.Popen[bytes]
        self._log: Path

    def __enter__(self) -> LocalServer:
        """Starts the server and waits until it is ready. Raises ChatError with the last lines of its log."""
        if missing := missing_parts(["runtime"]):
            raise ChatError(f"a model needs the runtime: {how_to_install(missing)}; or name the URL of a server")
        descriptor, name = tempfile.mkstemp(prefix="treeline-chat-", suffix=".log")
        self._log = Path(name)
        port = _free_port()
        self.url = f"http://{LOOPBACK}:{port}"
        command = [sys.executable, "-m", "treeline_runtime", "--model", self._model, "--host", LOOPBACK]
        command += ["--port", str(port), "--no-events", "--metrics-port", "off", "--admin-port", "off"]
        with os.fdopen(descriptor, "wb") as log:
            self._process = subprocess.Popen(
                [*command, *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # Ctrl-C stops an answer, not the server
                preexec_fn=die_with_parent,
            )
        try:
            self._wait()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def check(self) -> None:
        """Raises ChatError where the server has ended."""
        if (status := self._process.poll()) is not None:
            lines = "\n".join(f"  | {line}" for line in self._last_lines())
            raise ChatError(f"the server of {self._model} ended with status {status}; its log is {self._log}:\n{lines}")

    def _wait(self) -> None:
        told = Text(f"starting a server of {self._model}", no_wrap=True, overflow="ellipsis")
        with (
            self._console.status(told) as status,
            httpx.Client(timeout=1.0, trust_env=False) as http,
        ):
            while True:
                self.check()
                with contextlib.suppress(httpx.HTTPError):
                    if http.get(f"{self.url}/ready").status_code == 200:
                        return
                if lines := self._last_lines():
                    status.update(
                        Text.assemble(told, ": ", (brief(lines[-1]), "dim"), no_wrap=True, overflow="ellipsis")
                    )
                time.sleep(POLL_S)

    def _last_lines(self) -> list[str]:
        with self._log.open("rb") as log:
            log.seek(max(0, self._log.stat().st_size - 8192))
            return [printable(line) for line in log.read().decode(errors="replace").splitlines()[-LAST_LINES:]]

    def _end(self) -> None:
        """Its log stays if it has ended by itself."""
        process = self._process
        try:
            if process.poll() is None:
                self._log.unlink(missing_ok=True)
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_S)
        finally:  # also where Ctrl-C comes again
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and processes that it may have left
            process.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((LOOPBACK, 0))
        port: int = found.getsockname()[1]
        return port
