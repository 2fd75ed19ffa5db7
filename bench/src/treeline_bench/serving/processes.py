"""Load processes: an order is divided, started at one moment, followed, stopped, and put together."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

from treeline_bench.context import ClientFailed
from treeline_bench.processes import before_exec
from treeline_bench.serving.messages import LoadReport, Order, Progress

HEAD_START_S = 0.05
"""Seconds from the order to the start."""
START_S = 60.0
STOP_S = 10.0


def shares(order: Order, processes: int) -> list[Order]:
    """Every n-th conversation for each, and its part of the concurrency. Never more parts than conversations, or than
    concurrent ones; calls go to one process."""
    count = min(processes, len(order.conversations) or 1)
    if order.arrivals is None:
        count = min(count, order.concurrency)
    return [
        msgspec.structs.replace(
            order,
            conversations=order.conversations[part::count],
            arrivals=None if order.arrivals is None else order.arrivals[part::count],
            concurrency=order.concurrency // count + (part < order.concurrency % count),
        )
        for part in range(count)
    ]


class Load:
    """A running order. As a context manager it ends the processes."""

    def __init__(self, order: Order, processes: int, folder: Path, cores: Sequence[int] | None = None) -> None:
        """`cores`: the cores that the processes may use."""
        self._folder, self._cores = folder, cores
        self._parts = shares(order, processes)
        self._children: list[subprocess.Popen[bytes]] = []
        self._began = False

    def __enter__(self) -> Load:
        try:
            for number, part in enumerate(self._parts):
                path = self._folder / f"order{number}.msgpack"
                path.write_bytes(msgspec.msgpack.encode(part))
                self._children.append(self._spawn(path, number))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            for pipe in (child.stdin, child.stdout):
                with contextlib.suppress(OSError):
                    cast(BinaryIO, pipe).close()

    def run(self, progress: Callable[[Progress], None] = lambda progress: None) -> list[LoadReport]:
        """Starts, and waits for the end; `progress` gets the sums now and then. Raises ClientFailed. Ctrl-C raises
        KeyboardInterrupt; `stop` then returns the reports so far.
        """
        self._await_ready()
        self._began = True
        begin = time.monotonic_ns() + int(HEAD_START_S * 1e9)
        self._write(f"{begin}\n".encode())
        self._follow(progress)
        return self._reports()

    def stop(self) -> list[LoadReport]:
        """Ends early; returns the reports so far. Raises ClientFailed."""
        if not self._began:
            return []
        self._write(b"stop\n")
        deadline = time.monotonic() + STOP_S
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(deadline - time.monotonic(), 0.1))
        return self._reports()

    # ---- children -------------------------------------------------------------------------------------------

    def _spawn(self, order_path: Path, number: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "treeline_bench.serving.worker"]
        with self._log(number).open("wb") as log:
            return subprocess.Popen(
                [*command, str(order_path), str(self._report_path(number))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # a Ctrl-C reaches us alone, and we stop them in order
                preexec_fn=before_exec(self._cores),
            )

    def _await_ready(self) -> None:
        with selectors.DefaultSelector() as selector:
            for number, child in enumerate(self._children):
                selector.register(cast(BinaryIO, child.stdout), selectors.EVENT_READ, number)
            deadline = time.monotonic() + START_S
            while selector.get_map():
                ready = selector.select(max(deadline - time.monotonic(), 0))
                if not ready:
                    raise ClientFailed(f"the load processes did not start within {START_S:g} s")
                for key, _ in ready:
                    if cast(BinaryIO, key.fileobj).readline() != b"ready\n":
                        raise self._failed(key.data)
                    selector.unregister(key.fileobj)

    def _write(self, line: bytes) -> None:
        for child in self._children:
            with contextlib.suppress(OSError):  # its end is noticed elsewhere
                pipe = cast(BinaryIO, child.stdin)
                pipe.write(line)
                pipe.flush()

    def _follow(self, progress: Callable[[Progress], None]) -> None:
        """Runs until all have closed their output."""
        latest = [Progress(0, 0, 0, 0) for _ in self._children]
        rests = [b""] * len(self._children)
        with selectors.DefaultSelector() as selector:
            for number, child in enumerate(self._children):
                selector.register(cast(BinaryIO, child.stdout), selectors.EVENT_READ, number)
            while selector.get_map():
                for key, _ in selector.select():
                    data = os.read(key.fd, 1 << 16)
                    if not data:
                        selector.unregister(key.fileobj)
                        continue
                    *lines, rests[key.data] = (rests[key.data] + data).split(b"\n")
                    if lines:
                        latest[key.data] = msgspec.json.decode(lines[-1], type=Progress)
                progress(_sum(latest))

    def _reports(self) -> list[LoadReport]:
        found = []
        for number, child in enumerate(self._children):
            path = self._report_path(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(STOP_S)
            if child.returncode != 0 or not path.exists():
                raise self._failed(number)
            found.append(msgspec.msgpack.decode(path.read_bytes(), type=LoadReport))
        return found

    def _failed(self, number: int) -> ClientFailed:
        said = self._log(number).read_text(errors="replace")[-2000:]
        return ClientFailed(f"a load process ended:\n{said}")

    def _log(self, number: int) -> Path:
        return self._folder / f"load{number}.log"

    def _report_path(self, number: int) -> Path:
        return self._folder / f"report{number}.msgpack"


def _sum(parts: Sequence[Progress]) -> Progress:
    return Progress(
        sum(part.running for part in parts),
        sum(part.ended for part in parts),
        sum(part.failed for part in parts),
        sum(part.tokens for part in parts),
    )
