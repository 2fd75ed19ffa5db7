"""The frame around every child process: how it gets its orders, lives as long as its parent, and fails in words.

A child reads one line of JSON (`ChildSpec`) from standard input. The parent keeps that pipe open: end of file means
stop, whether the parent closed it or was killed. The scheduler may be too busy to notice, so on Linux the kernel kills
it with its parent. Anything else that comes asks what the child is doing: a thread of its own says that in the log,
also while the child stands still.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable

import msgspec
import zmq

from treeline_runtime.args import ServerArgs
from treeline_runtime.ipc import Addresses, Failed, Outbox, Process
from treeline_runtime.parent_end import end_with_parent

NOTICE_S = 0.1
"""Until a child has noticed the order to stop, where others have got it at the same time."""

logger = logging.getLogger(__name__)


class ChildSpec(msgspec.Struct, frozen=True):
    """What every child gets from its parent."""

    args: ServerArgs
    addresses: Addresses
    model_dir: str
    epoch: int
    rank: int = 0
    """Of this process, among those of its kind."""
    started_at: float = 0.0
    """When the server was started, Unix seconds."""
    listener: int | None = None
    """An HTTP worker's: descriptor of the socket that it listens on."""


class StartError(Exception):
    """The child cannot do its work, for a reason that the user can act on."""


def setup_logging(process: str, level: str) -> None:
    """Logs go to standard error, one line each, with the process's name."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format=f"%(asctime)s %(levelname)-7s {process:<11} %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )


def run_child(
    kind: str, run: Callable[[ChildSpec, zmq.Context[zmq.Socket[bytes]]], None], *, farewell_s: float = 0.0
) -> int:
    """Runs `run` as a child of this kind; returns the exit status (0 only after an order to stop). `farewell_s`: what
    `run` has to end by itself when standard input ends, if it has said how by then (`call_at_end`).
    """
    if kind == "scheduler":
        end_with_parent()
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=ChildSpec)
    process = Process(kind, spec.rank).name
    setup_logging(process, spec.args.log_level)
    faulthandler.enable()  # the watchdog ends a stuck child with SIGABRT: then its stacks are in the log
    threading.Thread(target=_watch_parent, args=(spec.addresses, farewell_s), name="lifeline", daemon=True).start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        run(spec, context)
        context.destroy(linger=0)
        return 0
    except StartError as error:
        _report(context, spec, Failed(process, str(error)))
    except Exception as error:
        if _told_to_stop.wait(NOTICE_S):  # the first to notice removes the folder of all children's sockets
            context.destroy(linger=0)
            return 0
        logger.exception("the %s process failed", process)
        _report(context, spec, Failed(process, f"{type(error).__name__}: {error}"))
    return 1


_activity: list[Callable[[], str]] = []
_endings: list[Callable[[], object]] = []
_told_to_stop = threading.Event()


def tell_when_asked(describe: Callable[[], str]) -> None:
    """`describe` says what this process is doing, in a few lines; it is called in another thread."""
    _activity.append(describe)


def call_at_end(end: Callable[[], object]) -> None:
    """`end` has `run` end by itself when standard input ends; it is called in another thread, and must not raise."""
    _endings.append(end)


def _watch_parent(addresses: Addresses, farewell_s: float) -> None:
    while os.read(0, 1):
        for describe in _activity:
            logger.error("asked what it is doing: %s", describe())
    _told_to_stop.set()
    addresses.remove()  # the parent does it too, unless it was killed
    for end in _endings:
        end()
    if _endings:
        time.sleep(farewell_s)
    os._exit(0)


def _report(context: zmq.Context[zmq.Socket[bytes]], spec: ChildSpec, failure: Failed) -> None:
    outbox = Outbox(context, spec.addresses.http)
    outbox.send(failure)
    outbox.flush(timeout_ms=500)
    context.destroy(linger=500)
