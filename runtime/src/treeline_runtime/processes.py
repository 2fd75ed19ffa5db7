"""A server's processes, on both sides: how the parent starts, watches and ends children, and how a child runs.

A child reads one line of JSON (`ChildSpec`) from standard input. The parent keeps that pipe open, and its end means
stop, whether the parent closed it or was killed. The scheduler may be too busy to notice, so on Linux the kernel kills
it with its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import fcntl
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq
from treeline_wire.logs import set_up

from treeline_runtime.args import ServerArgs
from treeline_runtime.confined.child import end_with_parent
from treeline_runtime.ipc import Addresses, Failed, Outbox

FOLDER_PREFIX = "treeline-"
LOCK = "lock"
MAX_BASE = 60
"""The longest parent folder in bytes: socket paths may have 107 bytes on Linux, 103 on macOS."""
MODULES = {
    "scheduler": "treeline_runtime.scheduler_process",
    "detokenizer": "treeline_runtime.detokenizer_process",
    "publisher": "treeline_runtime.publisher.process",
}
STOP_S = 3.0
"""Time for children to end by themselves before they are killed."""
NOTICE_S = 0.1
"""Time for a child to notice an order to stop that others got at the same moment."""

logger = logging.getLogger(__name__)


class ChildSpec(msgspec.Struct, frozen=True):
    """The arguments that a child gets from its parent."""

    args: ServerArgs
    addresses: Addresses
    model_dir: str
    epoch: int

    @property
    def rank(self) -> int:
        return self.addresses.rank

    def name(self, process: str) -> str:
        """The process's name in logs and messages: with its rank, where there are several."""
        return process if self.args.dp_size == 1 else f"rank {self.rank} {process}"


class StartError(Exception):
    """The child cannot work, for a reason that the user can fix."""


def setup_logging(process: str, level: str, form: str | None) -> None:
    """Logs to standard error, with the process's name."""
    set_up(level, "treeline", "treeline_runtime", form=form, process=process)


# ---- the parent's side ------------------------------------------------------------------------------------------


def how_ended(status: int) -> str:
    """Says it of a process with this exit status (negative: minus the signal): "was killed by SIGKILL"."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


class SocketFolder:
    """A private folder for ipc sockets, or for files in shared memory; removed at the end.

    If all of a server's processes are killed, none removes it. So its owner holds a lock in it, and each process that
    makes a folder first removes ours without a lock.
    """

    def __init__(self, base: Path | None = None) -> None:
        """base: its parent. None: that of temporary files, whose path must be short for sockets."""
        if base is None:
            base = Path(tempfile.gettempdir())
            if len(os.fsencode(base)) > MAX_BASE:
                base = Path("/tmp")
        _remove_stale(base)
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


def spawn(module: str, channel: socket.socket | None = None) -> subprocess.Popen[bytes]:
    """The child inherits blocked signals: Ctrl-C reaches the whole terminal group, but only the parent decides.

    channel: the child's standard input and output. None: a pipe, and the parent's standard error.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE if channel is None else channel.fileno(),
            stdout=sys.__stderr__ if channel is None else channel.fileno(),
            stderr=sys.__stderr__ or subprocess.DEVNULL,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class ProcessGroup:
    """Child processes by name. `on_end` is called in the event loop for each that ends, with name and exit status."""

    def __init__(self, on_end: Callable[[str, int], None]) -> None:
        self._on_end = on_end
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._ended: dict[str, asyncio.Future[None]] = {}

    def start(self, process: str, spec: ChildSpec) -> None:
        child, name = spawn(MODULES[process]), spec.name(process)
        self._children[name] = child
        assert child.stdin is not None
        child.stdin.write(msgspec.json.encode(spec) + b"\n")
        child.stdin.flush()
        loop = asyncio.get_running_loop()
        ended = self._ended[name] = loop.create_future()

        def on_end(status: int) -> None:
            ended.set_result(None)
            self._on_end(name, status)

        def wait() -> None:
            status = child.wait()
            loop.call_soon_threadsafe(on_end, status)

        threading.Thread(target=wait, daemon=True, name=f"{name} wait").start()

    def abort(self, name: str) -> None:
        """Ends a stuck child so that its stacks are logged (`faulthandler`)."""
        self._children[name].send_signal(signal.SIGABRT)

    async def stop(self) -> None:
        """Ends all children: closes their standard input, and kills them after `STOP_S`."""
        if not self._children:
            return
        for child in self._children.values():
            assert child.stdin is not None
            child.stdin.close()
        await asyncio.wait(self._ended.values(), timeout=STOP_S)
        for name, child in self._children.items():
            if not self._ended[name].done():
                child.kill()
        await asyncio.wait(self._ended.values())


# ---- a child's side ---------------------------------------------------------------------------------------------

_told_to_stop = threading.Event()


def run_child(process: str, run: Callable[[ChildSpec, zmq.Context[zmq.Socket[bytes]]], None]) -> int:
    """Runs `run` as this child; returns the exit status (0 only after an order to stop)."""
    if process == "scheduler":
        end_with_parent()
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=ChildSpec)
    setup_logging(spec.name(process), spec.args.log_level, spec.args.log_format)
    faulthandler.enable()  # the watchdog ends a stuck child with SIGABRT: then its stacks are in the log
    threading.Thread(target=_watch_parent, args=(spec.addresses,), name="lifeline", daemon=True).start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        run(spec, context)
        context.destroy(linger=0)
        return 0
    except StartError as error:
        last_words(context, spec, Failed(process, str(error)))
    except Exception as error:
        if _told_to_stop.wait(NOTICE_S):  # the first to notice removes the folder of all children's sockets
            context.destroy(linger=0)
            return 0
        logger.exception("the %s process failed", spec.name(process))
        last_words(context, spec, Failed(process, f"{type(error).__name__}: {error}"))
    return 1


def _watch_parent(addresses: Addresses) -> None:
    while os.read(0, 1):
        pass
    _told_to_stop.set()
    addresses.remove()  # the parent does it too, unless it was killed
    os._exit(0)


def last_words(context: zmq.Context[zmq.Socket[bytes]], spec: ChildSpec, failure: Failed) -> None:
    outbox = Outbox(context, spec.addresses.of("http"))
    outbox.send(failure)
    outbox.flush(timeout_ms=500)
    context.destroy(linger=500)
