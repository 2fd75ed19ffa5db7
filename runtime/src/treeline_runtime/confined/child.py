"""The child's side of a confined process. Its only descriptor is a socket to the parent, as standard input.

The process starts with an empty environment. After its imports it can open no file or socket, has a memory limit, and
is killed by a signal when a request takes too long. When the parent ends, the socket and so the process end. See
`process` for the parent's side. A process that starts others (it reads bodies, and those render templates) limits its
own memory, and only the parent watches its time.
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
"""After a request larger than this, freed memory is returned to the system."""
_HEADER: Final = struct.Struct(">I")
"""The header of a frame: its payload's bytes."""
_CHUNK: Final = 1 << 20
_PR_SET_PDEATHSIG = 1


class ProcessLimits(msgspec.Struct, frozen=True):
    """The first frame. `memory_bytes` are added to the memory after the imports."""

    seconds: float
    """Processor seconds for one request; 0: the parent decides for each."""
    memory_bytes: int
    starts_processes: bool = False
    """May open files and start processes; then `memory_bytes` has no effect."""
    threads: bool = False
    ends_with_thread: bool = False
    """On Linux it is killed when the parent's thread that started it ends. Otherwise it notices the parent's end only
    between requests."""


def serve(answer: Callable[[bytearray], bytes]) -> None:
    """Serves requests from standard input until its end. A MemoryError ends the process, whose heap may be fragmented.
    Everything that `answer` needs must be imported."""
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
    """Forbids new descriptors, files, processes and core dumps, and limits further memory."""
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
    """On Linux, lets the kernel kill this process when the thread that started it ends (`prctl(2)`). A parent that has
    already ended is not noticed."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def send_frame(sock: socket.socket, *parts: bytes) -> None:
    """Sends one payload made of the parts. Raises OSError."""
    sock.sendall(_HEADER.pack(sum(map(len, parts))))
    for part in parts:
        sock.sendall(part)


def read_frame(sock: socket.socket, deadline: float | None = None) -> bytearray | None:
    """The next payload; None if the other side closed. `deadline`: of `time.monotonic`. Raises OSError."""
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
