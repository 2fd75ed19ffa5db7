"""A few threads for what the scheduler may not wait for: it gives them work, and takes what they have done."""

from __future__ import annotations

import logging
import os
import queue
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

T = TypeVar("T")
R = TypeVar("R")
Work = Literal["copy", "read", "write", "ask"]
"""Copies of memory; reads and writes of the disk; what asks peers."""

THREADS = min(8, os.cpu_count() or 1)
"""For each kind of work, but …"""
ASK_THREADS = 64
"""… these, which mostly wait."""
LOG_S = 60.0
"""The shortest time between two lines about failures."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Job:
    """Work that some threads share: each has a part of the items."""

    kind: Work
    parts: list[Sequence[Any]]
    then: Callable[[list[Any], float], None]
    futures: list[Future[tuple[list[Any], float]]] = field(default_factory=list)
    ended: int = 0

    def finish(self) -> BaseException | None:
        """Returns what has kept a thread from its part, if anything has."""
        results, total, failed = list[Any](), 0.0, None
        for part, future in zip(self.parts, self.futures, strict=True):
            if (error := future.exception()) is not None:
                failed = error
            found, seconds = ([], 0.0) if error is not None else future.result()
            results += found + [None] * (len(part) - len(found))
            total += seconds
        self.then(results, total / len(self.parts))
        return failed


class Workers:
    """A few threads for what the scheduler may not wait for."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """wake: called in any thread when `take` will have something."""
        kinds: tuple[Work, ...] = get_args(Work)
        self._threads = {
            kind: ThreadPoolExecutor(ASK_THREADS if kind == "ask" else THREADS, f"treeline {kind}") for kind in kinds
        }
        self._ended: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._wake = wake
        self.busy = Counter[Work]()
        self._logged_at = float("-inf")

    def start(
        self,
        kind: Work,
        parts: list[Sequence[T]],
        work: Callable[[Sequence[T]], list[R]],
        then: Callable[[list[R | None], float], None],
    ) -> None:
        """Runs `work` on each part in a thread; it returns results of the first items of its part. `then` is called in
        a later `take` with one for each item, None if there is none, and the seconds that a thread took."""
        self.busy[kind] += 1
        job = _Job(kind, parts, then)

        def timed(part: Sequence[T]) -> tuple[list[R], float]:
            began = time.perf_counter()
            return work(part), time.perf_counter() - began

        def ended(_: object) -> None:
            self._ended.put(job)
            self._wake()

        for part in parts:
            future = self._threads[kind].submit(timed, part)
            job.futures.append(future)
            future.add_done_callback(ended)

    def take(self, wait_s: float = 0.0) -> bool:
        """Takes the results that are there, or waits so long for one. Returns whether there were any."""
        found = False
        while not self._ended.empty() or (wait_s and not found):
            try:
                job = self._ended.get(timeout=wait_s)
            except queue.Empty:
                break
            found = True
            job.ended += 1
            if job.ended == len(job.parts):
                self.busy[job.kind] -= 1
                error = job.finish()
                if error is not None and time.monotonic() - self._logged_at >= LOG_S:
                    self._logged_at = time.monotonic()
                    logger.error("pages could not be copied", exc_info=error)
        return found

    def close(self) -> None:
        """Waits for what is being done."""
        for threads in self._threads.values():
            threads.shutdown(cancel_futures=True)
