"""Confined processes that threads share: lent to one at a time, kept for the next one, lost where a borrower fails."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from treeline_runtime.confined.process import ConfinedProcess

P = TypeVar("P", bound=ConfinedProcess)

_CLOSED = "closing: no process is lent any more"


class PoolClosedError(Exception):
    """Nothing is lent any more."""


class ConfinedPool(Generic[P]):
    """As many processes as were ever borrowed at once; the borrower bounds that. `close` ends them."""

    def __init__(self, start: Callable[[], P], *, keep: Callable[[P], bool] = lambda process: True) -> None:
        """start: called by a borrower, which waits until it is ready, when none is idle. keep: may the process serve
        once more?"""
        self._start = start
        self._keep = keep
        self._idle: list[P] = []
        self._busy: set[P] = set()
        self._closed = False
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def lend(self) -> Iterator[P]:
        """A process for one thread; it is ended where that thread raises, whatever state it was left in.

        Raises PoolClosedError, and what `start` and `wait_ready` raise.
        """
        process = self._take()
        try:
            yield process
        except BaseException:
            self._drop(process)
            raise
        if self._keep(process):
            self._put_back(process)
        else:
            self._drop(process)

    def close(self) -> None:
        """End all processes, also those that are lent: their borrowers see them end."""
        with self._lock:
            self._closed = True
            idle, busy = [*self._idle], [*self._busy]
            self._idle.clear()
        for process in idle:
            process.end()
        for process in busy:
            process.kill()  # its borrower ends the rest

    def pids(self) -> list[int]:
        """Of all processes, idle and lent."""
        with self._lock:
            return [process.pid for process in (*self._idle, *self._busy)]

    def _take(self) -> P:
        process = self._take_idle()
        if process is not None:
            return process
        process = self._start()
        with self._lock:
            self._busy.add(process)
            closed = self._closed
        try:
            if closed:  # meanwhile, and `close` has not seen it
                raise PoolClosedError(_CLOSED)
            process.wait_ready()
        except BaseException:
            self._drop(process)
            raise
        return process

    def _take_idle(self) -> P | None:
        with self._lock:
            if self._closed:
                raise PoolClosedError(_CLOSED)
            while self._idle:
                process = self._idle.pop()
                if process.alive():
                    self._busy.add(process)
                    return process
                process.end()
        return None

    def _put_back(self, process: P) -> None:
        with self._lock:
            self._busy.discard(process)
            if not self._closed:
                self._idle.append(process)
                return
        process.end()

    def _drop(self, process: P) -> None:
        with self._lock:
            self._busy.discard(process)
        process.end()
