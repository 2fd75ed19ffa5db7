"""The process that renders what must not be rendered elsewhere: `python -m treeline_runtime.templates.worker`.

It is started with an empty environment and one descriptor, a socket to its parent as standard input. After its imports
it can open no file and no socket, has a limit on its memory, and dies by a signal when a rendering takes too long,
whatever the interpreter is busy with. When the parent goes, the socket ends and so does this. See `pool`.

Frames both ways: four bytes of length (big-endian), then the payload. A request is a `Request` in MessagePack; an
answer is one byte, an `Answer`, and a text.
"""

from __future__ import annotations

import enum
import resource
import signal
import socket
import struct
import sys
import time
from datetime import UTC, datetime
from typing import Any, Final

import jinja2
import msgspec
from treeline_wire.template_env import RaisedError, TemplateEnvironment, compile_template, line_of

HEADER: Final = struct.Struct(">I")
_CHUNK: Final = 1 << 20


class Request(msgspec.Struct, array_like=True):
    """One rendering, at `now` (seconds of the epoch). `source` is sent to a worker that has not seen `key` yet."""

    key: int
    now: float
    source: str | None
    variables: dict[str, Any]


class Settings(msgspec.Struct, array_like=True):
    """The first frame: the limits of this process."""

    memory_bytes: int
    seconds: float


class Answer(enum.IntEnum):
    """What a text is, that a worker answers."""

    READY = 0
    RENDERED = 1
    RAISED = 2
    """The template refused the messages; the text is its reason, if it is a constant of the template."""
    FAILED = 3
    """The template does not fit the messages; the text says where, and nothing of the messages."""
    BROKEN = 4
    """The template does not compile."""
    NO_MEMORY = 5


class Worker:
    """Compiles each template once and renders."""

    def __init__(self) -> None:
        self._environment = TemplateEnvironment()
        self._templates: dict[int, tuple[jinja2.Template, frozenset[str]]] = {}

    def answer(self, request: Request) -> tuple[Answer, str]:
        """The answer to one request. Raises MemoryError."""
        if request.source is not None:
            try:
                self._templates[request.key] = compile_template(self._environment, request.source)
            except MemoryError:
                raise
            except Exception as error:
                return Answer.BROKEN, f"{type(error).__name__}: {error}"
        template, texts = self._templates[request.key]
        self._environment.clock = lambda: datetime.fromtimestamp(request.now, UTC)
        try:
            rendered = template.render(request.variables)
            rendered.encode()
            return Answer.RENDERED, rendered
        except RaisedError as error:
            return Answer.RAISED, str(error) if str(error) in texts else ""
        except MemoryError:
            raise
        except Exception as error:
            return Answer.FAILED, f"{type(error).__name__} at line {line_of(error)}"


def read_frame(sock: socket.socket, deadline: float | None = None) -> bytearray | None:
    """The next payload; None when the other side has closed. `deadline` is of `time.monotonic`. Raises OSError."""
    header = _read(sock, HEADER.size, deadline)
    return None if header is None else _read(sock, HEADER.unpack(header)[0], deadline)


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


def _confine(memory_bytes: int) -> None:
    """No new descriptors, files, processes or core dumps, and so much more memory than there is now."""
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
    try:
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")  # of all in the container, this is what the kernel shall end first
    except OSError:
        pass
    for limit, value in (
        (resource.RLIMIT_AS, now + memory_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 0),
    ):
        resource.setrlimit(limit, (value, value))


def main() -> None:
    """Serve requests from standard input until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    sock = socket.socket(fileno=0)
    first = read_frame(sock)
    if first is None:
        return
    settings = msgspec.msgpack.decode(first, type=Settings)
    decode = msgspec.msgpack.Decoder(Request).decode
    worker = Worker()
    for warm in ("{{ strftime_now('%c') }}{{ [1]|tojson(indent=1) }}{{ 'x'|urlencode }}", "{{ 1 + 'x' }}"):
        worker.answer(Request(0, 0.0, warm, {}))  # imports what is imported late: for dates, for errors
    _confine(settings.memory_bytes)
    _send(sock, Answer.READY, "")
    while (frame := read_frame(sock)) is not None:
        signal.setitimer(signal.ITIMER_REAL, settings.seconds)
        try:
            kind, text = worker.answer(decode(frame))
            del frame
            _send(sock, kind, text)
        except MemoryError:
            _send(sock, Answer.NO_MEMORY, "")
            sys.exit(1)  # what is left of its memory may be in pieces
        signal.setitimer(signal.ITIMER_REAL, 0)


def _send(sock: socket.socket, kind: Answer, text: str) -> None:
    payload = bytes([kind]) + text.encode(errors="replace")
    sock.sendall(HEADER.pack(len(payload)))
    sock.sendall(payload)


if __name__ == "__main__":
    main()
