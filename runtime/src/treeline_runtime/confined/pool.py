"""A pool of confined processes shared by threads: each is lent to one at a time, kept afterwards, and ended if the
borrower fails.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from treeline_runtime.confined.process import ConfinedProcess

P = TypeVar("P", bound=ConfinedProcess)

_CLOSED = "closing: no process is lent any more"


class PoolClosedError(Exception):
    """The pool is closed."""


class ConfinedPool(Generic[P]):
    """Has as many processes as were borrowed at once; borrowers limit that. `close` ends them."""

    def __init__(self, start: Callable[[], P], *, keep: Callable[[P], bool] = lambda process: True) -> None:
        """start: called by a borrower if no process is idle. keep: whether a process may serve again."""
        self._start = start
        self._keep = keep
        self._idle: list[P] = []
        self._busy: set[P] = set()
        self._closed = False
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def lend(self) -> Iterator[P]:
        """Lends a process to one thread; if that thread raises, the process is ended.

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
        """Ends all processes, lent ones too: their borrowers see them end."""
        with self._lock:
            self._closed = True
            idle, busy = [*self._idle], [*self._busy]
            self._idle.clear()
        for process in idle:
            process.end()
        for process in busy:
            process.kill()  # its borrower ends the rest

    def pids(self) -> list[int]:
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
