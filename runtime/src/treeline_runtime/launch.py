"""The process group: starts the children, notices the end of any of them, and ends them all."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from treeline_runtime.child import ChildSpec
from treeline_runtime.ipc import Process

FOLDER_PREFIX = "treeline-"
LOCK = "lock"
MAX_BASE = 60
"""Bytes of the folder above ours: socket paths may have 107 bytes on Linux, 103 on macOS."""
MODULES = {
    "scheduler": "treeline_runtime.scheduler_process",
    "detokenizer": "treeline_runtime.detokenizer_process",
    "publisher": "treeline_runtime.publisher.process",
    "http": "treeline_runtime.http_worker",
}
STOP_S = 3.0
"""What children get to end by themselves before they are killed."""


@dataclass(frozen=True)
class Ended:
    """A child has ended."""

    process: str
    status: int
    """Exit status; negative = minus the signal that killed it."""

    def __str__(self) -> str:
        if self.status < 0:
            try:
                how = f"was killed by {signal.Signals(-self.status).name}"
            except ValueError:
                how = f"was killed by signal {-self.status}"
        else:
            how = f"ended with status {self.status}"
        return f"the {self.process} process {how}"


class SocketFolder:
    """A private folder for the ipc sockets, removed at the end.

    If every process of a server is killed, none is left to remove it. So its owner holds a lock in it, and each process
    that makes a folder first removes those of ours that no one holds any more.
    """

    def __init__(self) -> None:
        base = tempfile.gettempdir()
        if len(os.fsencode(base)) > MAX_BASE:
            base = "/tmp"
        _remove_stale(Path(base))
        self.path = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=base))
        # locked before it has its name: no process may find it unlocked
        self._lock = os.open(self.path / "new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(self.path / "new", self.path / LOCK)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_stale(base: Path) -> None:
    for lock in base.glob(f"{FOLDER_PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError):  # held, of another user, or being removed by another server
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(descriptor)


def spawn(
    module: str, stdin: int, environment: Mapping[str, str], descriptors: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """A process of ours. It inherits blocked signals: Ctrl-C reaches the whole terminal group, but only the parent
    decides. Of our file descriptors it has these. What it prints goes to standard error."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=stdin,
            stdout=sys.__stderr__,
            env={**environment, "TOKENIZERS_PARALLELISM": "false"},
            pass_fds=descriptors,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class ProcessGroup:
    """Children of this process. `on_end` is called in the event loop for each that ends, expected or not."""

    def __init__(self, on_end: Callable[[Ended], None]) -> None:
        self._on_end = on_end
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._ended: dict[str, asyncio.Future[None]] = {}

    def start(self, started: Process, spec: ChildSpec, listener: socket.socket | None = None) -> None:
        """Starts one child and hands it its orders (see `child`), and the socket that it is to listen on."""
        process = started.name
        descriptor = None if listener is None else listener.fileno()
        child = spawn(MODULES[started.kind], subprocess.PIPE, os.environ, [] if descriptor is None else [descriptor])
        self._children[process] = child
        assert child.stdin is not None
        orders = msgspec.structs.replace(spec, rank=started.rank, listener=descriptor)
        child.stdin.write(msgspec.json.encode(orders) + b"\n")
        child.stdin.flush()
        loop = asyncio.get_running_loop()
        ended = self._ended[process] = loop.create_future()

        def on_end(status: int) -> None:
            ended.set_result(None)
            self._on_end(Ended(process, status))

        def wait() -> None:
            status = child.wait()
            loop.call_soon_threadsafe(on_end, status)

        threading.Thread(target=wait, daemon=True, name=f"{process} wait").start()

    def ask(self, process: str) -> None:
        """Has a child say in the log what it is doing (see `child`), if it still can."""
        pipe = self._children[process].stdin
        assert pipe is not None
        with contextlib.suppress(OSError):
            pipe.write(b"?")
            pipe.flush()

    def abort(self, process: str) -> None:
        """Ends a stuck child so that its stacks are logged (`faulthandler`)."""
        self._children[process].send_signal(signal.SIGABRT)

    async def stop(self) -> None:
        """Ends all children: by closing their standard input, and after `STOP_S` by force."""
        if not self._children:
            return
        for child in self._children.values():
            assert child.stdin is not None
            child.stdin.close()
        await asyncio.wait(self._ended.values(), timeout=STOP_S)
        for process, child in self._children.items():
            if not self._ended[process].done():
                child.kill()
        await asyncio.wait(self._ended.values())
