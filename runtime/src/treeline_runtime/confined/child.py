"""The confined side: one descriptor, a socket to the parent as standard input, and nothing else.

A process is started with an empty environment. After its imports it can open no file and no socket, has a limit on its
memory, and dies by a signal when a request takes too long, whatever the interpreter is busy with. When the parent goes,
the socket ends and so does the process. See `process` for the parent's side. One that starts processes of its own (it
reads bodies, whose templates others render) limits its memory by itself, and the parent alone watches its time.
"""

from __future__ import annotations

import ctypes
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Final

import msgspec

READY = b"ready"
TRIM_BYTES = 128 << 10
"""After a request larger than this, freed memory goes back to the system."""
_HEADER: Final = struct.Struct(">I")
"""Before each frame, the bytes of its payload."""
_CHUNK: Final = 1 << 20
_PR_SET_PDEATHSIG = 1


class ProcessLimits(msgspec.Struct, frozen=True):
    """The first frame. `memory_bytes` are on top of what the process has after its imports."""

    seconds: float
    """Of one request; 0 = the parent says how long each may take."""
    memory_bytes: int
    starts_processes: bool = False
    """It may open files and start processes; then `memory_bytes` means nothing."""
    threads: bool = False
    """It may start threads."""
    ends_with_thread: bool = False
    """On Linux it is killed when the thread of the parent that started it ends, however that comes. Without this it
    notices only between requests that the parent has gone."""


def serve(answer: Callable[[bytearray], bytes]) -> None:
    """Serve requests from standard input until it ends. A MemoryError ends the process: what is left of its memory may
    be in pieces. Everything that `answer` needs is imported."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    sock = socket.socket(fileno=0)
    first = read_frame(sock)
    if first is None:
        return
    limits = msgspec.msgpack.decode(first, type=ProcessLimits)
    if limits.ends_with_thread:
        end_with_parent()
    _confine(limits)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)
    send_frame(sock, READY)
    while (frame := read_frame(sock)) is not None:
        size = len(frame)
        signal.setitimer(signal.ITIMER_REAL, limits.seconds)
        try:
            payload = answer(frame)
            del frame
            send_frame(sock, payload)
            del payload
        except MemoryError:
            sys.exit(1)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if size > TRIM_BYTES:
            trim(0)


def _confine(limits: ProcessLimits) -> None:
    """No new descriptors, files, processes or core dumps, and so much more memory than there is now."""
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
    try:
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")  # of all in the container, this is what the kernel shall end first
    except OSError:
        pass
    if limits.starts_processes:
        return
    caps = [
        (resource.RLIMIT_AS, now + limits.memory_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 0),
    ]
    if not limits.threads:
        caps.append((resource.RLIMIT_NPROC, 0))  # which counts threads, too
    for limit, value in caps:
        resource.setrlimit(limit, (value, value))


def end_with_parent() -> None:
    """On Linux, have the kernel kill this process when the thread that started it ends (`prctl(2)`), be that with its
    whole process. Who is gone already is not noticed."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def send_frame(sock: socket.socket, *parts: bytes) -> None:
    """One payload, which the parts make together. Raises OSError."""
    sock.sendall(_HEADER.pack(sum(map(len, parts))))
    for part in parts:
        sock.sendall(part)


def read_frame(sock: socket.socket, deadline: float | None = None) -> bytearray | None:
    """The next payload; None when the other side has closed. `deadline` is of `time.monotonic`. Raises OSError."""
    header = _read(sock, _HEADER.size, deadline)
    return None if header is None else _read(sock, _HEADER.unpack(header)[0], deadline)


def _read(sock: socket.socket, size: int, deadline: float | None) -> bytearray | None:
    data = bytearray()
    while len(data) < size:
        if deadline is not None:
            sock.settimeout(max(deadline - time.monotonic(), 1e-3))
        piece = sock.recv(min(size - len(data), _CHUNK))
        if not piece:
            return None
        data += piece
    return data
