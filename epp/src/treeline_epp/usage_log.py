"""What was used, by whom: a JSON object a line for each request, for those who bill.

The event loop only appends to a bounded list; a thread writes. Where it cannot keep up (a full disk, a pipe that nobody
reads) lines are dropped and counted, and requests go on. No text of a prompt or an answer is in a line.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import threading
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import msgspec

from treeline_epp.metrics import Sample
from treeline_epp.requests.exchange import Exchange, Observer

log = logging.getLogger(__name__)

MOST_WAITING_BYTES = 8 * 1024 * 1024
_LONGEST = 256
_STOP_S = 5.0


class Line(msgspec.Struct, omit_defaults=False):
    """One request. Null is "not known"; the page docs/operations.md says what each member is."""

    time: str
    request_id: str
    client: str | None
    flow: str
    path: str
    model: str
    target: str
    pool: str | None
    endpoint: str | None
    served_by: str | None
    status: int | None
    code: str | None
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    duration_s: float | None


def line_of(exchange: Exchange) -> Line:
    """What is told of a request whose stream has ended."""
    usage, decision, refusal = exchange.usage, exchange.decision, exchange.refusal
    duration = exchange.duration_s
    return Line(
        time=datetime.fromtimestamp(exchange.wall_time, UTC).isoformat(timespec="milliseconds"),
        request_id=exchange.id[:_LONGEST],
        client=None if exchange.client is None else exchange.client[:_LONGEST],
        flow=exchange.flow[:_LONGEST],
        path=exchange.path[:_LONGEST],
        model=exchange.model[:_LONGEST],
        target=exchange.target[:_LONGEST],
        pool=None if decision is None else decision.endpoint.pool,
        endpoint=None if decision is None else decision.endpoint.name,
        served_by=exchange.served,
        status=exchange.status,
        code=None if refusal is None else refusal.code,
        prompt_tokens=usage.prompt,
        cached_tokens=usage.cached,
        output_tokens=usage.output,
        duration_s=None if duration is None else round(duration, 6),
    )


class Sink(Protocol):
    """Where lines go. Used by one thread."""

    def write(self, data: bytes) -> None:
        """All of it. Raises OSError."""
        ...

    def reopen(self) -> None:
        """The file was moved away. Raises OSError."""
        ...

    def close(self) -> None:
        """Nothing more comes."""
        ...


class StdoutSink:
    """Standard output, which the log does not use."""

    def write(self, data: bytes) -> None:
        _write_all(1, data)

    def reopen(self) -> None:
        pass

    def close(self) -> None:
        pass


class FileSink:
    """A file that is rotated when it would have more than `most_bytes`: `files` older ones stay, as NAME.1 (the newest)
    to NAME.N. Several processes may write to one, and others may move it away. Raises OSError."""

    def __init__(self, path: Path, most_bytes: int, files: int) -> None:
        self._path = path
        self._most = most_bytes
        self._files = files
        self._torn = False
        self._fd: int | None = None
        self._open()

    def write(self, data: bytes) -> None:
        fd = self._current()
        size = os.fstat(fd).st_size
        if size and size + len(data) > self._most:
            fd = self._rotate(fd)
        # What was written before something failed may have ended within a line.
        before = b"\n" if self._torn else b""
        self._torn = True
        _write_all(fd, before + data)
        self._torn = False

    def reopen(self) -> None:
        self.close()
        self._open()

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> int:
        self._fd = fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        self._torn = False
        if os.fstat(fd).st_size:
            with self._path.open("rb") as file:
                file.seek(-1, os.SEEK_END)
                self._torn = file.read() != b"\n"
        return fd

    def _current(self) -> int:
        """The file that has the name now."""
        if self._fd is not None and self._has_the_name(self._fd):
            return self._fd
        self.close()
        return self._open()

    def _has_the_name(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(fd))
        except FileNotFoundError:
            return False

    def _rotate(self, fd: int) -> int:
        # Of processes that find it full at one time, one moves it; the others see that when they have the lock.
        fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            if self._has_the_name(fd):
                for at in range(self._files - 1, 0, -1):
                    with contextlib.suppress(FileNotFoundError):
                        os.replace(self._older(at), self._older(at + 1))
                os.replace(self._path, self._older(1))
        finally:
            self.close()  # and with it goes the lock
        return self._open()

    def _older(self, at: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{at}")


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


class UsageLog(Observer):
    """Takes exchanges on the event loop's thread and writes their lines on one of its own.

    Each counter has one thread that writes it: `dropped` and what was put the loop's, the others the writer's.
    """

    def __init__(self, sink: Sink, most_bytes: int = MOST_WAITING_BYTES) -> None:
        self._sink = sink
        self._most = most_bytes
        self._lines: deque[bytes] = deque()
        self._put_bytes = 0
        self._taken_bytes = 0
        self.written = 0
        self.failed = 0
        self.dropped = 0
        self._said = ""
        self._reopen = False
        self._stopping = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="usage-log", daemon=True)
        self._encode = msgspec.json.Encoder().encode

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    async def stop(self) -> None:
        """Write what is there, for a few seconds at most."""
        self._stopping = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join, _STOP_S)
        if self._thread.is_alive():
            log.error("usage log: %d lines could not be written in %g s", len(self._lines), _STOP_S)

    def reopen(self) -> None:
        """Before the next line: the file was moved away."""
        self._reopen = True
        self._wake.set()

    def ended(self, exchange: Exchange) -> None:
        """O(1)."""
        if exchange.observed:
            return
        line = self._encode(line_of(exchange)) + b"\n"
        if self._put_bytes - self._taken_bytes + len(line) > self._most:
            self.dropped += 1
            return
        self._put_bytes += len(line)
        self._lines.append(line)
        if not self._wake.is_set():
            self._wake.set()

    def samples(self) -> Iterator[Sample]:
        """For the metrics page."""
        text = "Lines of the usage log: written, failed to be written, or dropped because too many were waiting."
        for result, count in (("written", self.written), ("failed", self.failed), ("dropped", self.dropped)):
            yield "counter", "usage_lines", text, {"result": result}, count

    # ---- the writer's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not (self._stopping and not self._lines):
            self._wake.wait()
            self._wake.clear()
            self._write()
        self._sink.close()

    def _write(self) -> None:
        batch = [self._lines.popleft() for _ in range(len(self._lines))]
        data = b"".join(batch)
        try:
            if self._reopen:
                self._reopen = False
                self._sink.reopen()
            if data:
                self._sink.write(data)
            self.written += len(batch)
            self._said = ""
        except OSError as error:
            self.failed += len(batch)
            if str(error) != self._said:
                self._said = str(error)
                log.error("usage log: lines are lost: %s", error)
        self._taken_bytes += len(data)
